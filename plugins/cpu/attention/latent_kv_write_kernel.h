// Rows of a latent cache, token by token: [norm(latent) | rotated key]; and the last columns of queries rotated.
//
// Floor: a row is 4 * head_dim bytes to read and head_dim * itemsize to write; queries are read and written once.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/latent_kv_write_args.h"
#include "attention/rope_kv_write_kernel.h"
#include "ingot/kernel.h"

namespace ingot {
namespace {

constexpr int64_t kMaxLatent = 1024;

// Of a whole number: log(f 2^e) = e ln 2 + 2 artanh(s), s = (f - 1) / (f + 1) within 0.172, by its series in double: no
// library's logarithm, whose last bits may differ between machines.
inline double log_of_count(int64_t count) {
  int exponent;
  double f = std::frexp(static_cast<double>(count), &exponent);
  if (f < 0.70710678) f *= 2, --exponent;
  const double s = (f - 1) / (f + 1), square = s * s;
  double sum = 0;
  for (int i = 19; i >= 1; i -= 2) sum = sum * square + 1.0 / i;
  return exponent * 0.6931471805599453 + 2 * s * sum;
}

template <typename S, typename T>
void latent_kv_write(const LatentKvWriteArgs& args, const Team& team) {
  const PagedKv& kv = args.kv;
  const int64_t rank = kv.value_dim, rotary_dim = kv.head_dim - rank, width = args.heads * args.q_dim;
  alignas(64) float row[kMaxLatent];
  const Team::Range mine = team.share(kv.tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const float* cos_sin = args.cos_sin == nullptr ? nullptr : args.cos_sin + t * 2 * args.half;
    const float* latent = args.latent + t * kv.head_dim;
    norm_runs<S>(latent, args.norm, rank, rank, args.norm_eps, row);
    rotate<S>(latent + rank, cos_sin, args.half, rotary_dim, args.interleaved, row + rank);
    const int64_t block = kv.block_tables[kv.sequence_of[t] * kv.table_width + kv.positions[t] / kv.block_size];
    T* to = reinterpret_cast<T*>(kv.keys + block * kv.block_bytes) + kv.positions[t] % kv.block_size * kv.head_dim;
    for (int64_t i = 0; i < kv.head_dim; i += S::kWidth) {
      const int64_t n = kv.head_dim - i;
      store_lanes<S>(to + i, load_lanes<S>(row + i, n), n);
    }
    const double grown = args.growth * log_of_count(1 + kv.positions[t] / args.growth_every);
    const auto factor = static_cast<float>(1 + grown);
    for (int64_t h = 0; h < args.heads; ++h) {
      const float* q = args.q + t * width + h * args.q_dim;
      float* y = args.y + t * width + h * args.q_dim;
      const int64_t still = args.q_dim - rotary_dim;
      if (y != q) std::copy_n(q, still, y);
      rotate<S>(q + still, cos_sin, args.half, rotary_dim, args.interleaved, y + still);
      if (factor == 1) continue;
      for (int64_t i = 0; i < args.q_dim; i += S::kWidth)
        store_lanes<S>(y + i, S::mul(load_lanes<S>(y + i, args.q_dim - i), S::set1(factor)), args.q_dim - i);
    }
  }
}

}  // namespace
}  // namespace ingot
