// Norms queries and keys where the model does, turns queries and keys by their positions' angles and stores keys and values in the KV cache: keys transposed
// [head_dim][tokens], values [tokens][padded_dim] with zeros beyond head_dim. Layout: KvLayout in src/ingot/plan.py.
#pragma once

#include <cmath>

#include "ingot/kernel.h"
#include "row_sum.h"

namespace ingot {
namespace {

constexpr int64_t kMaxHeadDim = 256;

// Dims beyond 2 * half are copied. Products and sums round separately, vector or not.
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

template <typename S, typename T>
void rope_kv_write(const RopeKvWriteArgs& args, const Team& team) {
  const PagedKv& kv = args.kv;
  const int64_t dim = kv.head_dim, width = (args.heads + 2 * kv.kv_heads) * dim;
  const int64_t q_width = args.heads * dim, k_width = kv.kv_heads * dim;
  const bool normed = args.q_norm || args.k_norm;
  float* scratch = normed ? reinterpret_cast<float*>(team.scratch(static_cast<size_t>(q_width + k_width) * sizeof(float))) : nullptr;
  const Team::Range mine = team.share(kv.tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float* q = args.qkv + t * width;
    const float* k = q + args.heads * dim;
    const float* v = k + kv.kv_heads * dim;
    if (args.q_norm) {
      norm_runs<S>(q, args.q_norm, q_width, args.q_run, args.norm_eps, scratch);
      q = scratch;
    }
    if (args.k_norm) {
      norm_runs<S>(k, args.k_norm, k_width, args.k_run, args.norm_eps, scratch + q_width);
      k = scratch + q_width;
    }
    const float* cos_sin = args.cos_sin + (args.cos_sin ? t * 2 * args.half : 0);
    for (int64_t h = 0; h < args.heads; ++h)
      rotate<S>(q + h * dim, cos_sin, args.half, dim, args.interleaved, args.q + (t * args.heads + h) * dim);
    const int64_t slot = kv.positions[t] % kv.block_size;
    const int64_t block = kv.block_tables[kv.sequence_of[t] * kv.table_width + kv.positions[t] / kv.block_size];
    for (int64_t h = 0; h < kv.kv_heads; ++h) {
      alignas(64) float turned[kMaxHeadDim];
      alignas(64) T stored[kMaxHeadDim];
      rotate<S>(k + h * dim, cos_sin, args.half, dim, args.interleaved, turned);
      for (int64_t i = 0; i < dim; i += S::kWidth) store_lanes<S>(stored + i, load_lanes<S>(turned + i, dim - i), dim - i);
      T* keys = static_cast<T*>(kv.keys) + (block * kv.kv_heads + h) * dim * kv.block_size + slot;
      for (int64_t d = 0; d < dim; ++d) keys[d * kv.block_size] = stored[d];
      T* values = static_cast<T*>(kv.values) + ((block * kv.kv_heads + h) * kv.block_size + slot) * kv.padded_dim;
      for (int64_t i = 0; i < dim; i += S::kWidth) store_lanes<S>(values + i, load_lanes<S>(v + h * dim + i, dim - i), dim - i);
      for (int64_t d = dim; d < kv.padded_dim; ++d) values[d] = T{};
    }
  }
}

}  // namespace
}  // namespace ingot
