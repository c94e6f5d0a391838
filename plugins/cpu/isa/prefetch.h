// How far ahead software asks for lines that are read once, in order.
#pragma once

#include <cstdint>

namespace ingot {

// All ones, or 0 where the CPU's own prefetching reads such a stream faster if software does not ask (cpu_isa.cpp).
extern const int64_t kAskAhead;

// How far ahead of a line to prefetch where memory, not arithmetic, sets the pace: `bytes`, or 0 where the CPU
// prefetches better by itself. Prefetching the line that is read anyway costs nothing.
inline int64_t ahead_of_reading(int64_t bytes) { return bytes & kAskAhead; }

// Such a CPU reads one stream of lines faster than several at once. Alone, a stream is read faster still if software
// asks for L1, but not for L2.
inline bool reads_one_stream() { return kAskAhead == 0; }

// kAskAtWork and ahead_of_work are what kAskAhead and ahead_of_reading are, for loops with many instructions for each
// line. Here a Zen 4 wants to be asked, and a Zen 5 does not: a Zen 4 computes an instruction of 64 bytes in two
// halves, and looks less far ahead.
extern const int64_t kAskAtWork;
inline int64_t ahead_of_work(int64_t bytes) { return bytes & kAskAtWork; }

// All ones, or 0 where a core reads memory fastest if it reads each line once, in the order of addresses, and software
// asks for nothing (Zen 4). There a second stream, lines that are left out, and lines that L2 is asked for out of turn
// all make the CPU's own prefetching look less far ahead.
extern const int64_t kAskInOrder;
inline int64_t ahead_in_order(int64_t bytes) { return bytes & kAskInOrder; }
inline bool reads_in_order() { return kAskInOrder == 0; }

extern const int64_t kL1Bytes;  // of data that the L1 of a core holds

}  // namespace ingot
