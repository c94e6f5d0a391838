// linear_attention, token by token for prompts and decode alike: one order of operations for every element of the
// state, whatever stands in the step. An item is some columns of a head's state, which depend on no other columns.
#pragma once

#include <algorithm>
#include <cmath>

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "isa/simd_math.h"
#include "matmul/activations.h"
#include "recurrent/linear_attention_args.h"

namespace ingot {
namespace {

constexpr int64_t kStateColumns = 64;  // of an item: with key_dim 128 its part of the state fits the L1 cache

template <typename S>
[[gnu::always_inline]] inline float first_lane(typename S::V v) {
  alignas(64) float lanes[S::kWidth];
  S::store(lanes, v);
  return lanes[0];
}

template <typename S>
[[gnu::always_inline]] inline float exp_of(float x) {
  return first_lane<S>(exp<S>(S::set1(x)));
}

// log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x|; log(1 + z) = 2 artanh(s), s = z / (2 + z) <= 1/3, by its series in
// double: no library's logarithm, whose last bits may differ between machines.
template <typename S>
[[gnu::always_inline]] inline float softplus(float x) {
  const double z = exp_of<S>(-std::fabs(x)), s = z / (2 + z), square = s * s;
  double sum = 0;
  for (int i = 19; i >= 1; i -= 2) sum = sum * square + 1.0 / i;
  return static_cast<float>((x > 0 ? x : 0) + 2 * s * sum);
}

// The same of many at once, its series in float32.
template <typename S>
[[gnu::always_inline]] inline typename S::V softplus_lanes(typename S::V x) {
  using V = typename S::V;
  const V z = exp<S>(S::sub(S::zero(), S::abs(x))), s = S::div(z, S::add(S::set1(2.0f), z)), square = S::mul(s, s);
  V sum = S::set1(1.0f / 15);
#pragma GCC unroll 7
  for (int i = 13; i >= 1; i -= 2) sum = S::fma(sum, square, S::set1(1.0f / static_cast<float>(i)));
  return S::fma(S::add(s, s), sum, S::max(S::zero(), x));
}

// exp(rate * step) of each dim of a key → decays
template <typename S>
void decay_row(const float* dt, float* decays, int64_t n, float rate, float least, float most) {
  for (int64_t i = 0; i < n; i += S::kWidth) {
    const typename S::V steps = softplus_lanes<S>(load_lanes<S>(dt + i, n - i));
    const typename S::V within = S::min(S::set1(most), S::max(S::set1(least), steps));
    store_lanes<S>(decays + i, exp<S>(S::mul(S::set1(rate), within)), n - i);
  }
}

// from * factor → to, factor = scale / sqrt(sum of squares + eps), or scale where eps is 0
template <typename S>
void scale_row(const float* from, float* to, int64_t n, float eps, float scale) {
  if (eps > 0) {
    const float squares = row_sum<S>(n, [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
      const typename S::V v = load_lanes<S>(from + i, lanes);
      return S::mul(v, v);
    });
    scale = scale / std::sqrt(squares + eps);
  }
  for (int64_t i = 0; i < n; i += S::kWidth)
    store_lanes<S>(to + i, S::mul(load_lanes<S>(from + i, n - i), S::set1(scale)), n - i);
}

// One token and item. from: null for a state of zeros; the lanes of vector j are columns j * kWidth on, of which `n`.
template <typename S, bool kWhole>
void state_token(const float* from, float* to, int64_t stride, int64_t key_dim, int64_t n, const float* k,
                 const float* q, const float* decays, float step, const float* strength, const float* v, float* y,
                 const float* skip) {
  using V = typename S::V;
  constexpr int kVectors = kStateColumns / S::kWidth;
  const auto lanes = [n](int j) { return kWhole ? int64_t{S::kWidth} : std::max<int64_t>(n - j * S::kWidth, 0); };
  const auto load = [&](const float* p, int j) __attribute__((always_inline)) {
    return kWhole ? S::load(p + j * S::kWidth) : load_lanes<S>(p + j * S::kWidth, lanes(j));
  };
  const auto store = [&](float* p, V value, int j) __attribute__((always_inline)) {
    kWhole ? S::store(p + j * S::kWidth, value) : store_lanes<S>(p + j * S::kWidth, value, lanes(j));
  };
  V known[kVectors], out[kVectors];
  for (int j = 0; j < kVectors; ++j) known[j] = out[j] = S::zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    const V key = S::set1(k[i]), fall = S::set1(decays[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V state = from == nullptr ? S::zero() : S::mul(load(from + i * stride, j), fall);
      known[j] = S::fma(state, key, known[j]);
      store(to + i * stride, state, j);
    }
  }
  V change[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    const V value = load(v, j);
    change[j] = strength ? S::mul(S::set1(*strength), S::sub(value, known[j])) : S::mul(S::set1(step), value);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    const V key = S::set1(k[i]), query = S::set1(q[i]);
    for (int j = 0; j < kVectors; ++j) {
      const V state = S::fma(key, change[j], load(to + i * stride, j));
      out[j] = S::fma(query, state, out[j]);
      store(to + i * stride, state, j);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    if (skip != nullptr) out[j] = S::fma(S::set1(*skip), load(v, j), out[j]);
    store(y, out[j], j);
  }
}

template <typename S>
void linear_attention(const LinearAttentionArgs& args, const Team& team) {
  const int64_t keys = args.key_heads * args.key_dim, values = args.heads * args.value_dim, cols = 2 * keys + values;
  const int64_t parts = (args.value_dim + kStateColumns - 1) / kStateColumns;
  auto* k = reinterpret_cast<float*>(team.scratch(static_cast<size_t>(3 * args.key_dim) * sizeof(float)));
  float *q = k + args.key_dim, *decays = q + args.key_dim;
  const Team::Range items = team.share(args.kv.sequences * args.heads * parts);
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t part = item % parts, head = item / parts % args.heads, sequence = item / parts / args.heads;
    const int64_t column = part * kStateColumns, n = std::min(args.value_dim - column, kStateColumns);
    const int64_t key_head = head / (args.heads / args.key_heads) * args.key_dim;
    const int64_t at_q = key_head + (args.values_first ? values + keys : 0);
    const int64_t at_k = key_head + (args.values_first ? values : keys);
    const int64_t at_v = head * args.value_dim + column + (args.values_first ? 0 : 2 * keys);
    const int64_t place = head * args.key_dim * args.value_dim + column;
    const float rate = -exp_of<S>(args.a_log[head]);
    args.kv.for_each_run(sequence, [&](int64_t begin, int64_t end, const float* before, float* after) {
      const float* from = before == nullptr ? nullptr : before + place;
      float* to = after + place;
      for (int64_t t = begin; t < end; ++t, from = to) {
        const float* x = args.x + t * cols;
        scale_row<S>(x + at_q, q, args.key_dim, args.l2_eps, args.scale);
        scale_row<S>(x + at_k, k, args.key_dim, args.l2_eps, 1.0f);
        float step = 0;
        if (args.by_dim) {
          const float* dt = args.dt + (t * args.heads + head) * args.key_dim;
          decay_row<S>(dt, decays, args.key_dim, rate, args.dt_min, args.dt_max);
        } else {
          step = std::min(std::max(softplus<S>(args.dt[t * args.heads + head]), args.dt_min), args.dt_max);
          std::fill_n(decays, args.key_dim, exp_of<S>(rate * step));
        }
        float strength = 0;
        if (args.beta)
          strength = first_lane<S>(over_logistic<S>(S::set1(1.0f), S::set1(args.beta[t * args.heads + head])));
        const auto run = n == kStateColumns ? state_token<S, true> : state_token<S, false>;
        run(from, to, args.value_dim, args.key_dim, n, k, q, decays, step, args.beta ? &strength : nullptr, x + at_v,
            args.y + t * values + head * args.value_dim + column, args.skip ? args.skip + head : nullptr);
      }
    });
  }
}

}  // namespace
}  // namespace ingot
