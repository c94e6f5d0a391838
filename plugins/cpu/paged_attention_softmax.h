// The online softmax of one row over the tokens of a tile that the row sees.
#pragma once

#include <limits>

#include "simd_math.h"

namespace ingot {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Scores of tokens begin .. end-1 become weights exp(score - top); top and sum follow them, and `rescale(factor)` is called
// where the maximum moved. at(i): scores of tokens i .. i + kWidth - 1; store(i, weights): 0 where the row sees nothing.
// kWhole: the row sees all of the tile, of kTile tokens.
template <typename S, int64_t kTile, bool kWhole, typename At, typename Store, typename Rescale>
[[gnu::always_inline]] inline void softmax_row(int64_t begin, int64_t end, float softcap, float& top, float& sum, At at,
                                               Store store, Rescale rescale) {
  using V = typename S::V;
  const auto first_lanes = [](int64_t n) { return S::first_lanes(n < 0 ? 0 : n < S::kWidth ? n : S::kWidth); };
  const auto kept = [&](int64_t i, V v, V otherwise) {  // v where the lane is a token that the row sees
    if constexpr (kWhole) return v;
    return S::select(first_lanes(begin - i), otherwise, S::select(first_lanes(end - i), v, otherwise));
  };
  const int64_t start = kWhole ? 0 : begin / S::kWidth * S::kWidth, stop = kWhole ? kTile : end;
  V tops = S::set1(kLowest);
  for (int64_t i = start; i < stop; i += S::kWidth) {
    V scores = S::load(at(i));
    if (softcap > 0) {
      scores = bend<S>(scores, softcap);
      S::store(at(i), scores);
    }
    tops = S::max(tops, kept(i, scores, S::set1(kLowest)));
  }
  const float tile_top = S::reduce_max(tops), old = top;
  top = tile_top > old ? tile_top : old;
  V sums = S::zero();
  for (int64_t i = start; i < stop; i += S::kWidth) {
    const V weights = kept(i, exp_weight<S>(S::sub(S::load(at(i)), S::set1(top))), S::zero());
    sums = S::add(sums, weights);
    store(i, weights);
  }
  if (top != old) {
    const V factor = exp<S>(S::set1(old - top));
    S::store_partial(&sum, S::mul(S::set1(sum), factor), 1);
    rescale(factor);
  }
  sum += S::reduce_add(sums);
}

}  // namespace
}  // namespace ingot
