// How far ahead software asks for lines that are read once, in order.
#pragma once

#include <cstdint>

namespace ingot {

// All ones, or 0 where the CPU's own prefetching reads such a stream faster if software does not ask (cpu_isa.cpp).
extern const int64_t kAskAhead;

// A distance for streams whose lines need so little work that memory sets the pace: where the CPU prefetches better, the
// line itself, which costs nothing.
inline int64_t ahead_of_reading(int64_t bytes) { return bytes & kAskAhead; }

}  // namespace ingot
