// The online softmax of one row over the tokens of a tile that the row sees.
#pragma once

#include <limits>

#include "simd_lanes.h"
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

// The same for rows whose scores lie in p [rows][kTile], each step for all of them, so that none waits for its maximum. What
// a row has gathered so far is left to be multiplied by its factor. seen(row): begin and end of the tokens that it sees;
// store(p of a row, i, weights).
template <typename S, int64_t kTile, bool kWhole, typename Seen, typename Store>
[[gnu::always_inline]] inline void softmax_rows(int64_t rows, float* p, float softcap, float* top, float* sum, float* factors,
                                                Seen seen, Store store) {
  using V = typename S::V;
  // f(i, kept) for the vectors of a row; kept(v, otherwise) is v where the lane is a token that the row sees
  const auto each = [&](int64_t row, auto f) __attribute__((always_inline)) {
    if constexpr (kWhole) {
      for (int64_t i = 0; i < kTile; i += S::kWidth) f(i, [](V v, V) { return v; });
    } else {
      const auto [begin, end] = seen(row);
      for (int64_t i = begin / S::kWidth * S::kWidth; i < end; i += S::kWidth)
        f(i, [&](V v, V otherwise) {
          const auto before = [i](int64_t n) { return S::first_lanes(n < i ? 0 : n - i < S::kWidth ? n - i : S::kWidth); };
          return S::select(before(begin), otherwise, S::select(before(end), v, otherwise));
        });
    }
  };
  for (int64_t row = 0; row < rows; ++row) {
    float* const scores = p + row * kTile;
    V tops = S::set1(kLowest);
    if (softcap > 0) each(row, [&](int64_t i, auto) { S::store(scores + i, bend<S>(S::load(scores + i), softcap)); });
    each(row, [&](int64_t i, auto kept) { tops = S::max(tops, kept(S::load(scores + i), S::set1(kLowest))); });
    const float tile_top = S::reduce_max(tops), old = top[row];
    top[row] = tile_top > old ? tile_top : old;
    factors[row] = old;
  }
  for (int64_t row = 0; row < rows; row += S::kWidth) {
    const int64_t n = rows - row;
    const V old = load_lanes<S>(factors + row, n), now = load_lanes<S>(top + row, n);
    const V factor = S::select(S::less_equal(now, old), S::set1(1.0f), exp<S>(S::sub(old, now)));
    store_lanes<S>(factors + row, factor, n);
    store_lanes<S>(sum + row, S::mul(load_lanes<S>(sum + row, n), factor), n);
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* const scores = p + row * kTile;
    const V now = S::set1(top[row]);
    V sums = S::zero();
    each(row, [&](int64_t i, auto kept) {
      const V weights = kept(exp_weight<S>(S::sub(S::load(scores + i), now)), S::zero());
      sums = S::add(sums, weights);
      store(scores, i, weights);
    });
    sum[row] += S::reduce_add(sums);
  }
}

}  // namespace
}  // namespace ingot
