// The largest number of a row, which those divide by who round it to int8.
#pragma once

#include <cmath>
#include <limits>

#include "isa/simd_lanes.h"

namespace ingot {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// The largest |x|; infinity where one of them is not finite.
template <typename S>
float row_absmax(const float* x, int64_t n) {
  constexpr int kTops = 4;
  typename S::V tops[kTops] = {S::zero(), S::zero(), S::zero(), S::zero()};
  int64_t i = 0;
  for (; i + kTops * S::kWidth <= n; i += kTops * S::kWidth)
#pragma GCC unroll 4
    for (int j = 0; j < kTops; ++j) tops[j] = S::max_abs(tops[j], S::load(x + i + j * S::kWidth));
  for (; i < n; i += S::kWidth) tops[0] = S::max_abs(tops[0], load_lanes<S>(x + i, n - i));
  const typename S::V top = S::max_abs(S::max_abs(tops[0], tops[1]), S::max_abs(tops[2], tops[3]));
  return S::reduce_max(S::select(S::less_equal(top, S::set1(kLargest)), top, S::set1(INFINITY)));
}

}  // namespace
}  // namespace ingot
