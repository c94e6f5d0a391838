// exp and tanh for every vector type of simd_*.h. Per lane the results do not depend on the type.
#pragma once

#include <limits>

namespace ingot {
namespace {

// q of e^(kSign r) = 1 + kSign r + q r^2 for |r| <= ln 2 / 2: a minimax polynomial (3.1e-9 of e^r).
template <typename S, int kSign = 1>
[[gnu::always_inline]] inline typename S::V exp_curve(typename S::V r) {
  typename S::V q = S::set1(0x1.6a21acp-10f);
  q = S::fma(q, r, S::set1(kSign * 0x1.123b6ap-7f));
  q = S::fma(q, r, S::set1(0x1.5558fap-5f));
  q = S::fma(q, r, S::set1(kSign * 0x1.555490p-3f));
  return S::fma(q, r, S::set1(0x1.fffffcp-2f));
}

// e^x within 1 ulp; below 2^-126 the result is 0, NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; n is added to the exponent of e^r.
template <typename S>
[[gnu::always_inline]] inline typename S::V exp(typename S::V x) {
  using V = typename S::V;
  const V lowest = S::set1(-87.33654f), highest = S::set1(88.72283f);
  const V magic = S::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const V inside = S::max(S::min(x, highest), lowest);
  const V shifted = S::fma(inside, S::set1(1.44269504f), magic);
  const V n = S::sub(shifted, magic);
  V r = S::fma(n, S::set1(-0x1.62e400p-1f), inside);  // ln 2, upper bits: n * upper is exact
  r = S::fma(n, S::set1(-0x1.7f7d1cp-20f), r);        // ln 2, the rest
  const V p = S::add(S::fma(S::mul(r, r), exp_curve<S>(r), r), S::set1(1.0f));
  const V power = S::add_exponent(p, shifted);
  const V finite = S::select(S::less(x, lowest), S::zero(), power);
  const V beyond = S::add(x, S::set1(std::numeric_limits<float>::infinity()));  // infinity, or NaN where x is NaN
  return S::select(S::less_equal(x, highest), finite, beyond);
}

// e^x for x <= 0, as a softmax wants it: within 2 ulp down to e^-69, below that e^-69, 1e-30 of the largest weight; NaN
// stays NaN.
template <typename S>
[[gnu::always_inline]] inline typename S::V exp_weight(typename S::V x) {
  using V = typename S::V;
  const V magic = S::set1(12582912.0f);
  const V inside = S::max(S::set1(-69.0f), x);  // NaN where x is
  const V shifted = S::fma(inside, S::set1(1.44269504f), magic), n = S::sub(shifted, magic);
  const V r = S::fma(n, S::set1(-0x1.62e430p-1f), inside);
  const V p = S::fma(S::fma(exp_curve<S>(r), r, S::set1(1.0f)), r, S::set1(1.0f));
  if constexpr (requires { S::scale(p, n); }) return S::scale(p, n);
  return S::select(S::less_equal(x, x), S::add_exponent(p, shifted), x);
}

// cap * tanh(x / cap), where tanh(u) = (1 - e^-2|u|) / (1 + e^-2|u|) with the sign of u; for |u| < 0.25 by its series,
// because the difference would lose digits.
template <typename S>
[[gnu::always_inline]] inline typename S::V bend(typename S::V x, float cap) {
  using V = typename S::V;
  const V u = S::div(x, S::set1(cap)), size = S::abs(u), one = S::set1(1.0f);
  const V fall = exp<S>(S::mul(S::set1(-2.0f), size));
  const V far = S::div(S::sub(one, fall), S::add(one, fall));
  const V square = S::mul(u, u);
  V q = S::set1(0.021869488f);  // 62 / 2835
  q = S::fma(q, square, S::set1(-0.053968254f));
  q = S::fma(q, square, S::set1(0.13333333f));
  q = S::fma(q, square, S::set1(-0.33333333f));
  const V near = S::fma(S::mul(u, square), q, u);
  const V sided = S::select(S::less(u, S::zero()), S::sub(S::zero(), far), far);
  return S::mul(S::select(S::less(size, S::set1(0.25f)), near, sided), S::set1(cap));
}

}  // namespace
}  // namespace ingot
