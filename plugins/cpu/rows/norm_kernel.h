// rms_norm and layer_norm, row by row. Reads x, residual and weights once from memory, later passes hit the cache.
#pragma once

#include <cmath>

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "rows/norm_args.h"

namespace ingot {
namespace {

template <typename S, bool kCentred>
void norm(const NormArgs& args, const Team& team) {
  using V = typename S::V;
  const int64_t hidden = args.hidden;
  const Team::Range mine = args.own ? Team::Range{0, args.rows} : team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* x = args.x + row * hidden;
    const float* residual = args.residual ? args.residual + row * hidden : nullptr;
    float* y = args.y + row * hidden;
    float* sum = args.sum ? args.sum + row * hidden : nullptr;
    float* kept = sum ? sum : residual ? y : nullptr;  // where x + residual waits for the second pass
    const float* total = kept ? kept : x;
    const float first = row_sum<S>(hidden, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      V v = load_lanes<S>(x + i, n);
      if (residual) v = S::add(v, load_lanes<S>(residual + i, n));
      if (kept) store_lanes<S>(kept + i, v, n);
      return kCentred ? v : S::mul(v, v);
    });
    const auto count = static_cast<float>(hidden);
    const float mean = kCentred ? first / count : 0.0f;
    float squares = first;
    if constexpr (kCentred)
      squares = row_sum<S>(hidden, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const V v = S::sub(load_lanes<S>(total + i, n), S::set1(mean));
        return S::select(S::first_lanes(n < S::kWidth ? n : S::kWidth), S::mul(v, v), S::zero());
      });
    const V factor = S::set1(1.0f / std::sqrt(squares / count + args.eps));
    for (int64_t i = 0; i < hidden; i += S::kWidth) {
      const int64_t n = hidden - i;
      const V v = S::mul(S::sub(load_lanes<S>(total + i, n), S::set1(mean)), factor);
      const V scaled = S::mul(v, load_lanes<S>(args.weight + i, n));
      store_lanes<S>(y + i, args.bias ? S::add(scaled, load_lanes<S>(args.bias + i, n)) : scaled, n);
    }
  }
}

}  // namespace
}  // namespace ingot
