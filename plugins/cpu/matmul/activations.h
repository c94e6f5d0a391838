// The activation functions on vectors, and the only list of them in C++; definitions in plugins/activations.py.
//
//   each(enumerator, name in plans, value of x on vectors of S)
#pragma once

#include <string_view>

#include "ingot/kernel.h"
#include "isa/simd_math.h"

#define INGOT_ACTIVATIONS(each)                                                                          \
  each(kNone, "none", x) each(kSilu, "silu", over_logistic<S>(x, x)) each(kGelu, "gelu", gelu_erf<S>(x)) \
      each(kGeluTanh, "gelu_tanh", gelu_tanh<S>(x)) each(kRelu, "relu", relu<S>(x))                      \
          each(kRelu2, "relu2", square<S>(relu<S>(x)))

namespace ingot {

#define INGOT_ACTIVATION(enumerator, name, value) enumerator,
enum class Activation : int32_t { INGOT_ACTIVATIONS(INGOT_ACTIVATION) };
#undef INGOT_ACTIVATION

// Finds an activation by its name in plans; whether there is one.
inline bool find_activation(std::string_view word, Activation* found) {
#define INGOT_ACTIVATION(enumerator, name, value) \
  if (word == (name)) return *found = Activation::enumerator, true;
  INGOT_ACTIVATIONS(INGOT_ACTIVATION)
#undef INGOT_ACTIVATION
  return false;
}

namespace {

// x / (1 + e^-z) within 3 x 2^-24 of it, where z is no nearer to zero than x. z counts as -87 .. 87, at whose ends this
// is 1e-38 x and x, and x as -87 at least. NaN in x stays NaN. e^-z as in simd_math.h, z = n ln 2 + r, without what
// other users of exp ask for at the ends.
template <typename S>
[[gnu::always_inline]] inline typename S::V over_logistic(typename S::V x, typename S::V z) {
  using V = typename S::V;
  const V one = S::set1(1.0f), magic = S::set1(12582912.0f);
  const V lowest = S::set1(-87.0f), inside = S::min(S::set1(87.0f), S::max(lowest, z));
  const V shifted = S::fma(inside, S::set1(-1.44269504f), magic), n = S::sub(shifted, magic);
  V r = S::fma(n, S::set1(0x1.62e400p-1f), inside);
  r = S::fma(n, S::set1(0x1.7f7d1cp-20f), r);
  const V p = S::fma(S::fma(exp_curve<S, -1>(r), r, S::set1(-1.0f)), r, one);
  return S::div(S::max(lowest, x), S::add(one, S::add_exponent(p, shifted)));
}

// x * P(X <= x) for a normal X. With z = |x| / sqrt(2) the tail is erfc(z) / 2 = t * exp(-z^2) * Q(t) / 2,
// t = 1 / (1 + 0.35 z); Q is a minimax fit (3.2e-8 relative), so that small tails keep their digits.
template <typename S>
[[gnu::always_inline]] inline typename S::V gelu_erf(typename S::V x) {
  using V = typename S::V;
  constexpr float kQ[] = {0.042726938f, -0.18315534f, 0.24006289f, -0.10787168f, 0.1552016f,
                          0.10874504f,  0.16427644f,  0.18506593f, 0.19748214f,  0.19746603f};
  const V one = S::set1(1.0f);
  const V z = S::mul(S::abs(x), S::set1(0.70710678f));
  const V t = S::div(one, S::fma(S::set1(0.35f), z, one));
  V q = S::set1(kQ[0]);
  for (int i = 1; i < 10; ++i) q = S::fma(q, t, S::set1(kQ[i]));
  const V gauss = exp<S>(S::sub(S::zero(), S::mul(z, z)));
  const V tail = S::mul(S::mul(S::set1(0.5f), S::mul(t, q)), gauss);
  return S::mul(x, S::select(S::less(x, S::zero()), tail, S::sub(one, tail)));
}

// 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
template <typename S>
[[gnu::always_inline]] inline typename S::V gelu_tanh(typename S::V x) {
  using V = typename S::V;
  const V cube = S::mul(S::mul(S::set1(0.044715f), x), S::mul(x, x));
  return over_logistic<S>(x, S::mul(S::set1(1.5957691f), S::add(x, cube)));
}

template <typename S>
[[gnu::always_inline]] inline typename S::V relu(typename S::V x) {
  return S::max(S::zero(), x);  // in this order NaN stays
}

template <typename S>
[[gnu::always_inline]] inline typename S::V square(typename S::V x) {
  return S::mul(x, x);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V activate(Activation activation, typename S::V x) {
  switch (activation) {
#define INGOT_ACTIVATION(enumerator, name, value) \
  case Activation::enumerator:                    \
    return value;
    INGOT_ACTIVATIONS(INGOT_ACTIVATION)
#undef INGOT_ACTIVATION
  }
  return x;
}

}  // namespace
}  // namespace ingot
