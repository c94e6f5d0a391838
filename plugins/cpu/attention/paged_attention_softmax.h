// The online softmax of rows over the tokens of a tile that they see.
#pragma once

#include <limits>

#include "isa/simd_lanes.h"
#include "isa/simd_math.h"

namespace ingot {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Scores p [rows][kTile] become weights exp(score - top), each step for all rows, so that none waits for its maximum.
// changes: scores become change(row, i, scores) before;
// top and sum follow them. What a row has gathered so far is left to be multiplied by its factor. seen(row): begin and
// end of the tokens that it sees; store(p of a row, i, weights): 0 where it sees nothing. kWhole: the rows see all of
// the tile.
template <typename S, int64_t kTile, bool kWhole, typename Change, typename Seen, typename Store>
[[gnu::always_inline]] inline void softmax_rows(int64_t rows, float* p, bool changes, Change change, float* top,
                                                float* sum, float* factors, Seen seen, Store store) {
  using V = typename S::V;
  // f(i, kept) for the vectors of a row; kept(v, otherwise) is v where the lane is a token that the row sees
  const auto each = [&](int64_t row, auto f) __attribute__((always_inline)) {
    if constexpr (kWhole) {
      for (int64_t i = 0; i < kTile; i += S::kWidth) f(i, [](V v, V) { return v; });
    } else {
      const auto [begin, end] = seen(row);
      for (int64_t i = begin / S::kWidth * S::kWidth; i < end; i += S::kWidth)
        f(i, [&](V v, V otherwise) {
          const auto before = [i](int64_t n) {
            return S::first_lanes(n < i ? 0 : n - i < S::kWidth ? n - i : S::kWidth);
          };
          return S::select(before(begin), otherwise, S::select(before(end), v, otherwise));
        });
    }
  };
  for (int64_t row = 0; row < rows; ++row) {
    float* const scores = p + row * kTile;
    V tops = S::set1(kLowest);
    if (changes) each(row, [&](int64_t i, auto) { S::store(scores + i, change(row, i, S::load(scores + i))); });
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
