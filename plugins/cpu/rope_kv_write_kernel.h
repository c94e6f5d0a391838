// Norms queries and keys where the model does, turns queries and keys by their positions' angles and stores keys and
// values in the KV cache, in the lines of kv_head.h; dims of values beyond head_dim are zeros. Threads may write the two
// tokens of a pair at once, so nothing but a token's own elements is touched. Either part may be missing: queries that
// attention turns itself (q is null), and keys and values where it does (no KV heads; a team of one, without scratch).
#pragma once

#include <cmath>

#include "ingot/kernel.h"
#include "kv_head.h"
#include "row_sum.h"
#include "row_top.h"

namespace ingot {
namespace {

constexpr int64_t kMaxHeadDim = 256;

// Dims beyond 2 * half are copied. Products and sums round separately, vector or not. y may be x.
template <typename S>
void rotate(const float* x, const float* cos_sin, int64_t half, int64_t dim, bool interleaved, float* y) {
  using V = typename S::V;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[2 * i], second = x[2 * i + 1];
      y[2 * i] = first * cosines[i] - second * sines[i];
      y[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
  } else {
    for (int64_t i = 0; i < half; i += S::kWidth) {
      const int64_t n = half - i;
      const V first = load_lanes<S>(x + i, n), second = load_lanes<S>(x + half + i, n);
      const V cosine = load_lanes<S>(cosines + i, n), sine = load_lanes<S>(sines + i, n);
      store_lanes<S>(y + i, S::sub(S::mul(first, cosine), S::mul(second, sine)), n);
      store_lanes<S>(y + half + i, S::add(S::mul(second, cosine), S::mul(first, sine)), n);
    }
  }
  for (int64_t i = 2 * half; i < dim; ++i) y[i] = x[i];
}

// y = x / rms(x) * weight over each run of x.
template <typename S>
void norm_runs(const float* x, const float* weight, int64_t width, int64_t run, float eps, float* y) {
  for (; width > 0; width -= run, x += run, y += run) {
    const float squares = row_sum<S>(run, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      const typename S::V v = load_lanes<S>(x + i, n);
      return S::mul(v, v);
    });
    const typename S::V factor = S::set1(1.0f / std::sqrt(squares / static_cast<float>(run) + eps));
    for (int64_t i = 0; i < run; i += S::kWidth) {
      const int64_t n = run - i;
      store_lanes<S>(y + i, S::mul(S::mul(load_lanes<S>(x + i, n), factor), load_lanes<S>(weight + i, n)), n);
    }
  }
}

// Codes of x [dim], zeros up to `padded`, a multiple of 16; returns their scale. The rule is round_to_int8 of
// plugins/quantised.py: a row that is not finite gets the scale NaN, one that is too small for 127 over it gets zeros.
template <typename S>
float quantise(const float* x, int64_t dim, int64_t padded, int8_t* codes) {
  const float top = row_top<S>(x, dim), inverse = 127.0f / top;
  const bool finite = top <= kLargest, usable = finite && inverse <= kLargest;
  for (int64_t i = 0; i < padded; i += S::kWidth)
    S::store_i8(codes + i, usable && i < dim ? S::mul(load_lanes<S>(x + i, dim - i), S::set1(inverse)) : S::zero());
  return finite ? top / 127.0f : NAN;
}

// x [dim] as the cache holds it, then zeros up to `padded`; returns the scale of the codes where there are codes.
template <typename S, typename T>
float store_row(const float* x, int64_t dim, int64_t padded, T* y) {
  if constexpr (kScaled<T>) {
    return quantise<S>(x, dim, padded, y);
  } else {
    for (int64_t i = 0; i < dim; i += S::kWidth) store_lanes<S>(y + i, load_lanes<S>(x + i, dim - i), dim - i);
    for (int64_t i = dim; i < padded; ++i) y[i] = T{};
    return 1.0f;
  }
}

// A key [dim] and a value [padded_dim] to their slot.
template <typename T>
void scatter(const T* key, const T* value, const PagedKv& kv, int64_t slot, T* keys, T* values) {
  T* to = key_lines(keys, kv.head_dim, slot) + slot % kKvLanes * kPair<T>;
  for (int64_t d = 0; d < kv.head_dim; d += kPair<T>, to += kLine<T>)
    for (int64_t i = 0; i < kPair<T>; ++i) to[i] = key[d + i];
  to = value_line(values, slot) + slot % kPair<T>;
  for (int64_t d = 0; d < kv.padded_dim; d += kKvLanes, to += kKvLanes * kv.block_size)
    for (int64_t i = 0; i < kKvLanes; ++i) to[i * kPair<T>] = value[d + i];
}

// Queries of token t, normed and turned → y [heads * head_dim].
template <typename S>
void turn_queries(const RopeKvWriteArgs& args, const float* q, const float* cos_sin, float* y) {
  const int64_t dim = args.kv.head_dim;
  if (args.q_norm) {
    norm_runs<S>(q, args.q_norm, args.heads * dim, args.q_run, args.norm_eps, y);
    q = y;
  }
  for (int64_t h = 0; h < args.heads; ++h) rotate<S>(q + h * dim, cos_sin, args.half, dim, args.interleaved, y + h * dim);
}

// Keys (after their rotation) and values of token t, KV head by KV head.
template <typename S, typename T>
void write_token(const RopeKvWriteArgs& args, int64_t t, const float* k, const float* v, const float* cos_sin) {
  const PagedKv& kv = args.kv;
  const int64_t dim = kv.head_dim, size = kv.block_size, slot = kv.positions[t] % size;
  const int64_t block = kv.block_tables[kv.sequence_of[t] * kv.table_width + kv.positions[t] / size];
  for (int64_t h = 0; h < kv.kv_heads; ++h) {
    alignas(64) float turned[kMaxHeadDim];
    alignas(64) T key[kMaxHeadDim], value[kMaxHeadDim];
    rotate<S>(k + h * dim, cos_sin, args.half, dim, args.interleaved, turned);
    T* keys = reinterpret_cast<T*>(kv.keys + block * kv.block_bytes) + h * kv_head_size<T>(dim, size);
    T* values = reinterpret_cast<T*>(kv.values + block * kv.block_bytes) + h * kv_head_size<T>(kv.padded_dim, size);
    const float key_scale = store_row<S>(turned, dim, kv.padded_dim, key);
    const float value_scale = store_row<S>(v + h * dim, dim, kv.padded_dim, value);
    scatter(key, value, kv, slot, keys, values);
    if constexpr (kScaled<T>) {
      kv_scales(keys, dim, size)[slot] = key_scale;
      kv_scales(values, kv.padded_dim, size)[slot] = value_scale;
    }
  }
}

template <typename S, typename T>
void rope_kv_write(const RopeKvWriteArgs& args, const Team& team) {
  const PagedKv& kv = args.kv;
  const int64_t dim = kv.head_dim, width = (args.heads + 2 * kv.kv_heads) * dim;
  const int64_t q_width = args.heads * dim, k_width = kv.kv_heads * dim;
  float* normed = args.k_norm ? reinterpret_cast<float*>(team.scratch(static_cast<size_t>(k_width) * sizeof(float))) : nullptr;
  const Team::Range mine = team.share(kv.tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float* q = args.qkv + t * width;
    const float* k = q + q_width;
    const float* v = k + k_width;
    const float* cos_sin = args.cos_sin + (args.cos_sin ? t * 2 * args.half : 0);
    if (args.q) turn_queries<S>(args, q, cos_sin, args.q + t * q_width);
    if (kv.kv_heads == 0) continue;
    if (args.k_norm) {
      norm_runs<S>(k, args.k_norm, k_width, args.k_run, args.norm_eps, normed);
      k = normed;
    }
    write_token<S, T>(args, t, k, v, cos_sin);
  }
}

}  // namespace
}  // namespace ingot
