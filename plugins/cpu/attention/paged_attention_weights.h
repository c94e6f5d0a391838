// Weights of a softmax that are rounded to bf16.
#pragma once

#include "isa/simd_math.h"

namespace ingot {
namespace {

// 2^t for t <= 0, within 8e-5 of it, since weights are rounded to bf16, by up to 2e-3; below 2^-100 that. NaN stays
// NaN.
template <typename S>
[[gnu::always_inline]] inline typename S::V weight_of(typename S::V t) {
  using V = typename S::V;
  const V inside = S::max(S::set1(-100.0f), t);
  const auto curve = [](V r) __attribute__((always_inline)) {  // minimax for |r| <= 1/2
    const V p = S::fma(S::set1(0x1.c3f760p-5f), r, S::set1(0x1.f0de1cp-3f));
    return S::fma(S::fma(p, r, S::set1(0x1.62f31ap-1f)), r, S::set1(0x1.fff692p-1f));
  };
  if constexpr (requires { S::scale(S::nearest(t), t); }) {
    const V n = S::nearest(inside);
    return S::scale(curve(S::sub(inside, n)), n);
  } else {
    const V magic = S::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
    const V shifted = S::add(inside, magic), r = S::sub(inside, S::sub(shifted, magic));
    return S::select(S::less_equal(t, t), S::add_exponent(curve(r), shifted), t);
  }
}

}  // namespace
}  // namespace ingot
