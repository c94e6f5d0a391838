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
  const V magic = S::set1(12582912.0f), inside = S::max(S::set1(-100.0f), t);
  const V n = S::sub(S::add(inside, magic), magic), r = S::sub(inside, n);
  V p = S::fma(S::set1(0x1.c3f760p-5f), r, S::set1(0x1.f0de1cp-3f));  // minimax for |r| <= 1/2
  p = S::fma(S::fma(p, r, S::set1(0x1.62f31ap-1f)), r, S::set1(0x1.fff692p-1f));
  if constexpr (requires { S::scale(p, n); }) return S::scale(p, n);
  return S::select(S::less_equal(t, t), S::add_exponent(p, S::add(inside, magic)), t);
}

}  // namespace
}  // namespace ingot
