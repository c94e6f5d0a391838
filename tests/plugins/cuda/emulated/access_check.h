// Every access of a kernel to memory, held against the others of its block and against what is allocated: what
// compute-sanitizer's racecheck and memcheck do. Without EMULATED_CHECKED nothing of it is there.
//
// The compiler calls __tsan_read4 and the like before each access (-fsanitize=thread, without its library). Two
// accesses to a byte of shared memory, one of them a write, are a race if a barrier does not lie between them; within a
// warp
// __syncwarp is enough, but no shuffle is.
#pragma once

#include <cstddef>

namespace emulated {

enum class Access { kRead, kWrite, kAtomic };

#ifdef EMULATED_CHECKED
void check_access(const void* address, size_t bytes, Access how);
void check_block(size_t threads, unsigned char* shared, size_t bytes);  // a new block runs
void check_barrier();
void check_warp(size_t warp);  // its lanes have met
void check_stop();             // no thread runs
#else
inline void check_access(const void*, size_t, Access) {}
inline void check_block(size_t, unsigned char*, size_t) {}
inline void check_barrier() {}
inline void check_warp(size_t) {}
inline void check_stop() {}
#endif

}  // namespace emulated
