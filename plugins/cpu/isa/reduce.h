// The sum that norms divide by. The order of its additions depends on the length of the row only: four vector sums over
// the row, then a tree.
#pragma once

#include "isa/simd_lanes.h"

namespace ingot {
namespace {

// Sum of term(i, lanes) over the vectors of a row; lanes beyond the row must come as zero.
template <typename S, typename Term>
[[gnu::always_inline]] inline float row_sum(int64_t hidden, Term term) {
  constexpr int kSums = 4;
  typename S::V sums[kSums] = {S::zero(), S::zero(), S::zero(), S::zero()};
  int64_t i = 0;
  for (; i + kSums * S::kWidth <= hidden; i += kSums * S::kWidth)
    for (int j = 0; j < kSums; ++j) sums[j] = S::add(sums[j], term(i + j * S::kWidth, int64_t{S::kWidth}));
  for (int j = 0; i < hidden; i += S::kWidth, ++j) sums[j] = S::add(sums[j], term(i, hidden - i));
  return S::reduce_add(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
}

}  // namespace
}  // namespace ingot
