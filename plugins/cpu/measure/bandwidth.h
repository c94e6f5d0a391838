// How fast this machine reads memory, to compare kernels with.
#pragma once

#include <cstdint>

namespace ingot {

// Bytes per second of the best of `passes` reads, in each of some ways, of a buffer of `bytes` by `threads` threads.
double read_bandwidth(int64_t bytes, int threads, int passes);

}  // namespace ingot
