// What kernels of screen take.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// The best tokens of rows of logits, see plugins/ops/screen.py.
struct ScreenArgs {
  const float* x;          // [rows, k]
  const float* centres;    // [rows, vocab]
  const float* scales;     // [vocab]
  const float* dither;     // [k]
  const std::byte* table;  // rows of w8, row_bytes each
  int64_t rows, vocab, k, row_bytes;
  int32_t* ids;         // [rows], -1 where a row is not decided
  int64_t* candidates;  // [rows]
};

// A session screens steps of at most so many rows: the more there are, the less the bytes of lm_head count beside its
// arithmetic, which a screen does not lessen.
constexpr int64_t kScreenRows = 4;
constexpr int64_t kScreenThreads = 256;  // a team's most

}  // namespace ingot
