// Causal attention over a bf16 KV cache on tile registers (AMX): queries and weights rounded to bf16, sums in float32;
// an online softmax over tiles of 128 tokens, anchored to positions. Items, splits and threads: paged_attention_rows.h.
//
//   scores [32 rows][128 tokens] += q [32 rows][32 dims] x keys [32 dims][16 tokens]    the cache's lines are the
//   operand out    [32 rows][dims]       += p [32 rows][32 tokens] x values [32 tokens][16 dims]
//
// A row's sums take dims and tokens in steps of 32 through the same instructions whatever rows share its tile, one row
// of a decode step too, so its bits depend on nothing else. What a row does not see has weight zero, and zero times a
// number adds nothing; but zero times NaN does. So values that not all rows see are copied first, with zeros where
// nobody looks; and where one of these is not finite, row by row (`weigh_apart`): it spoils those who see it and nobody
// else.
//
// Floors, of 32 rows x 128 tokens x 64 dims: 64 products of 16 cycles, with their loads and stores 1,500 cycles; the
// weights of 256 vectors of 16, 13 operations for two ports each, 1,660 cycles; 32 KiB of the cache for all rows of the
// item.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/kv_layout.h"
#include "attention/paged_attention_rows.h"
#include "attention/paged_attention_weights.h"
#include "matmul/matmul_tiles.h"

namespace ingot {
namespace {

// The right operands of some products: where each step's tile lies for the first panel, and how far the next panel's
// is.
template <typename S>
struct CacheTiles {
  static constexpr int kMostSteps = 16;  // of 32: dims of a head, at most 512, or tokens of a tile
  const std::byte* tiles[kMostSteps];
  const std::byte* ahead[kMostSteps];  // to fetch meanwhile, or null
  int64_t stride[kMostSteps];

  const std::byte* tile(int panel, int64_t step) const { return tiles[step] + panel * stride[step]; }
  void work(int panel, int64_t step) const {
    if (ahead[step] == nullptr) return;
    for (int64_t line = 0; line < kTileBytes; line += kLineBytes)
      S::prefetch(ahead[step] + panel * stride[step] + line);
  }
};

template <typename S, typename Tiles>
class TileAttention {
 public:
  using V = typename S::V;
  static_assert(S::kWidth == kKvLanes);
  static constexpr int64_t kItemRows = 128;  // four pairs share what the first one brings to L2
  static constexpr bool kSetsOut = true, kDividesOnce = true;
  static constexpr int64_t kTile = 128, kStep = 32;
  static constexpr int64_t kGroups = kTile / kKvLanes, kSteps = kTile / kStep;
  static constexpr int64_t kPairRows = 2 * kTileRows, kRowsAtOnce = 8, kTokensAhead = 2;
  static constexpr int64_t kPairFloats = kPairRows * kKvLanes;  // sums of two tiles of rows with 16 tokens or dims

  explicit TileAttention(const AttentionRows& rows) : rows_(rows), kv_(rows.kv) {}

  static int64_t floats(const PagedKv& kv) {
    return kItemRows / kPairRows * dim_steps(kv) * 2 * kTileFloats + kGroups * kPairFloats + kSteps * 2 * kTileFloats +
           (kGroups + kSteps * panels(kv)) * kTileFloats + 3 * panels(kv) * kPairFloats;
  }
  void allocate(float* memory) {
    const auto carve = [&memory](int64_t count) {
      float* taken = memory;
      memory += count;
      return taken;
    };
    q_ = reinterpret_cast<uint16_t*>(carve(kItemRows / kPairRows * dim_steps(kv_) * 2 * kTileFloats));
    scores_ = carve(kGroups * kPairFloats);
    p_ = reinterpret_cast<uint16_t*>(carve(kSteps * 2 * kTileFloats));
    tails_ = reinterpret_cast<uint16_t*>(carve(kGroups * kTileFloats));
    copies_ = reinterpret_cast<uint16_t*>(carve(kSteps * panels(kv_) * kTileFloats));
    for (float** each : {&out_, &apart_, &picked_}) *each = carve(panels(kv_) * kPairFloats);
  }

  void load_queries(const AttentionItem& item, float* rotated);
  void attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state);

 private:
  static constexpr int64_t kTileFloats = kTileBytes / int64_t{sizeof(float)};
  using Rows = Bf16Rows<S>;

  struct Range {
    int64_t begin, end;
  };
  // Two tiles of rows: their first row in the item, how many, and how many tiles.
  struct Pair {
    int64_t first, rows, tiles;
  };
  // A tile of tokens: where its groups lie, for tokens before `end`, and the steps in which some row of a pair sees
  // something; none from `end` on. Groups from `end` on, and those that no row sees any more, repeat another one's
  // place: their blocks may not be there.
  struct Groups {
    int64_t tile;
    Range used;
    const uint16_t* keys[kGroups];
    const uint16_t* values[kGroups];
  };

  static int64_t dim_steps(const PagedKv& kv) { return (kv.head_dim + kStep - 1) / kStep; }
  static int64_t panels(const PagedKv& kv) { return kv.padded_dim / kKvLanes; }
  Range seen(int64_t row, int64_t tile) const {  // tokens of the tile that a row of the item sees
    const auto inside = [tile](int64_t n) { return n < tile ? 0 : n < tile + kTile ? n - tile : kTile; };
    return {inside(seen_[row].begin), inside(seen_[row].end)};
  }

  Groups locate(const AttentionItem& item, const Pair& pair, int64_t tile, int64_t end) const;
  void score(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next);
  template <int kDimSteps>
  void score_short(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next);
  void score_long(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next, int64_t step);
  void softmax(const Pair& pair, const Groups& groups, const RowState& state);
  template <bool kAll, typename F>
  static void each_seen(Range seen, F f);
  template <bool kWhole>
  static V kept(Range seen, int64_t i, V v, V otherwise);
  template <bool kAll>
  void weigh_rows(const Pair& pair, const Groups& groups, const RowState& state, int64_t row, int64_t count);
  template <bool kAll, typename Seen>
  void raise_tops(const Seen& mine, int64_t row, int64_t count, int64_t tile, int64_t first, float* top, float* sum);
  template <bool kAll>
  V weigh_row(Range mine, Range used, int64_t row, float top);
  void clear_out() {
    std::fill_n(out_, panels(kv_) * kPairFloats, 0.0f);
    fresh_ = false;
  }
  void weigh(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next);
  void weigh_apart(Tiles& tiles, const Pair& pair, const Groups& groups);
  bool copy_values(int64_t step, Range seen, const Groups& groups);
  void products(Tiles& tiles, const Pair& pair, const uint16_t* x, int64_t steps, int64_t panels,
                const CacheTiles<S>& right, float* sums, bool first) const;

  const AttentionRows& rows_;
  const PagedKv& kv_;
  Range seen_[kItemRows];  // tokens that the item's rows see
  float slopes_[kItemRows];
  uint16_t* q_ = nullptr;    // [pair][dims / 32][2][16 rows][32], scaled, zeros beyond head_dim
  float* scores_ = nullptr;  // [group][2][16 rows][16 tokens] of a tile
  uint16_t* p_ = nullptr;    // [tokens / 32][2][16 rows][32]
  uint16_t* tails_ =
      nullptr;  // [group][16 lines]: the last dims of keys, then zeros, where head_dim is no multiple of 32
  uint16_t* copies_ = nullptr;  // [tokens / 32][dims / 16][16 lines]: values that not all rows see
  float *out_ = nullptr, *apart_ = nullptr, *picked_ = nullptr;  // [dims / 16][2][16 rows][16]
  bool fresh_ = true;                                            // whether out_ is yet to be written
};

template <typename S, typename Tiles>
void TileAttention<S, Tiles>::load_queries(const AttentionItem& item, float* rotated) {
  const int64_t steps = dim_steps(kv_), dims = kv_.head_dim, ahead = kTokensAhead * rows_.source_stride();
  rows_.tokens(item, rotated, [&](const AttentionRows::TokenRows& token) {
    const float* q = token.queries;
    const V scale = S::set1(rows_.scale(token.visible));
    const float* source = token.source + ahead;
    for (int64_t row = token.begin - item.begin; row < token.end - item.begin; ++row, q += dims, source += dims) {
      seen_[row] = {token.hidden, token.visible};
      slopes_[row] = rows_.slope(item, item.begin + row);
      uint16_t* to = q_ + (row / kPairRows * steps * kPairRows + row % kPairRows) * kStep;
      for (int64_t d = 0; d < steps * kStep; d += S::kWidth) {
        S::prefetch(source + std::min(d, dims));
        const int64_t n = dims - d;
        S::store_bf16(to + d / kStep * kPairRows * kStep + d % kStep,
                      n > 0 ? S::mul(load_lanes<S>(q + d, n), scale) : S::zero());
      }
    }
  });
}

template <typename S, typename Tiles>
typename TileAttention<S, Tiles>::Groups TileAttention<S, Tiles>::locate(const AttentionItem& item, const Pair& pair,
                                                                         int64_t tile, int64_t end) const {
  Groups groups{tile, {0, 0}, {}, {}};
  if (tile >= end) return groups;
  groups.used = {seen(pair.first, tile).begin / kStep,
                 (seen(pair.first + pair.rows - 1, tile).end + kStep - 1) / kStep};
  const int64_t seen_from = seen_[pair.first].begin / kKvLanes * kKvLanes;
  int64_t token = std::max(tile, seen_from), slot = token % kv_.block_size;  // of the first group
  const int32_t* block = rows_.blocks(item.sequence) + token / kv_.block_size;
  for (int64_t g = 0; g < kGroups; ++g) {
    const int64_t place = *block * kv_.block_bytes;
    const auto* keys = reinterpret_cast<const uint16_t*>(kv_.keys + place) + item.head * kv_.head_dim * kv_.block_size;
    const auto* values =
        reinterpret_cast<const uint16_t*>(kv_.values + place) + item.head * kv_.padded_dim * kv_.block_size;
    groups.keys[g] = key_lines(keys, kv_.head_dim, slot);
    groups.values[g] = value_line(values, slot);
    const int64_t following = tile + (g + 1) * kKvLanes;
    if (following <= token || following >= end) continue;
    token = following;
    slot += kKvLanes;
    if (slot == kv_.block_size) slot = 0, ++block;
  }
  return groups;
}

// Two tiles of rows after the other, each through the whole split, which lies in L2 by then. Products and the softmax
// take turns: they share a port of the CPU, and together take longer than one after the other.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state) {
  const int64_t rows = item.end - item.begin;
  if (begin >= end) return;
  Tiles tiles(rows < kTileRows ? rows : kTileRows);
  for (int64_t first = 0; first < rows; first += kPairRows) {
    const int64_t count = rows - first < kPairRows ? rows - first : kPairRows;
    const Pair pair{first, count, (count + kTileRows - 1) / kTileRows};
    fresh_ = true;
    for (Groups here = locate(item, pair, begin / kTile * kTile, end); here.tile < end;) {
      const Groups next = locate(item, pair, here.tile + kTile, end);
      const Groups* const fetched = first == 0 && next.tile < end ? &next : nullptr;
      if (here.used.begin < here.used.end) {
        score(tiles, pair, here, fetched);
        softmax(pair, here, state);
        weigh(tiles, pair, here, fetched);
      }
      here = next;
    }
    if (fresh_) clear_out();
    const int64_t dims = kv_.padded_dim, all = panels(kv_);
    float* to = state.out + first * dims;
    for (int64_t row = 0; row < count; ++row, to += dims)
      for (int64_t panel = 0; panel < all; ++panel)
        S::store(to + panel * kKvLanes, S::load(out_ + panel * kPairFloats + row * kKvLanes));
  }
}

// sums[panel] += x * the panel's tiles, for two tiles of rows and two panels at once.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::products(Tiles& tiles, const Pair& pair, const uint16_t* x, int64_t steps, int64_t panels,
                                       const CacheTiles<S>& right, float* sums, bool first) const {
  using Source = CacheTiles<S>;
  CacheTiles<S> at = right;
  for (int64_t panel = 0; panel < panels; panel += 2) {
    const BlockArgs<float> part{
        reinterpret_cast<const std::byte*>(x), 2 * kTileBytes, steps, sums + panel * kPairFloats, kPairFloats, first};
    const bool two = panel + 1 < panels;
    (pair.tiles == 2 ? two ? block<Rows, 2, 2, false, Tiles, Source> : block<Rows, 2, 1, false, Tiles, Source>
     : two           ? block<Rows, 1, 2, false, Tiles, Source>
                     : block<Rows, 1, 1, false, Tiles, Source>)(tiles, part, at);
    for (int64_t step = 0; step < steps; ++step) {
      at.tiles[step] += 2 * at.stride[step];
      if (at.ahead[step] != nullptr) at.ahead[step] += 2 * at.stride[step];
    }
  }
}

template <typename S, typename Tiles>
void TileAttention<S, Tiles>::score(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next) {
  if (kv_.head_dim == kStep) return score_short<1>(tiles, pair, groups, next);
  if (kv_.head_dim == 2 * kStep) return score_short<2>(tiles, pair, groups, next);
  for (int64_t step = groups.used.begin; step < groups.used.end; ++step) score_long(tiles, pair, groups, next, step);
}

// Queries of few dims stay in their tiles, and scores go from there as soon as they are done.
template <typename S, typename Tiles>
template <int kDimSteps>
void TileAttention<S, Tiles>::score_short(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next) {
  constexpr std::make_integer_sequence<int, kDimSteps> kEachStep;
  constexpr std::make_integer_sequence<int, 4> kEachGroup;
  const int64_t end = 2 * groups.used.end;
  for (int64_t tile = 0; tile < pair.tiles; ++tile) {
    const uint16_t* const q = q_ + (pair.first / kPairRows * kDimSteps * 2 + tile) * kTileRows * kStep;
    for_each(kEachStep, [&]<int kD>() { tiles.template load<4 + kD>(q + kD * kPairRows * kStep); });
    for (int64_t first = 2 * groups.used.begin; first < end; first += 4) {
      for_each(kEachGroup, [&]<int kG>() {
        tiles.template zero<kG>();
        const uint16_t* const keys = groups.keys[std::min(first + kG, end - 1)];
        for_each(kEachStep, [&]<int kD>() {
          tiles.template load<6 + kD>(keys + kD * kStep * kKvLanes);
          Rows::template dot<kG, 4 + kD, 6 + kD>(tiles);
        });
      });
      for_each(kEachGroup, [&]<int kG>() {
        if (first + kG < end)
          tiles.template store<kG>(scores_ + (first + kG) * kPairFloats + tile * kTileRows * kKvLanes);
      });
      if (next == nullptr || tile > 0) continue;
      for (int64_t g = first; g < first + 4; ++g)
        for (int64_t line = 0; line < kDimSteps * kStep / 2; ++line) S::prefetch(next->keys[g] + line * kKvLanes * 2);
    }
  }
}

// Of the two groups of a step, for any number of dims.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::score_long(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next,
                                         int64_t step) {
  const int64_t g = 2 * step, steps = dim_steps(kv_), whole = kv_.head_dim / kStep,
                tail = kv_.head_dim % kStep;  // dims
  CacheTiles<S> right{};
  const auto as_bytes = [](const uint16_t* p) { return reinterpret_cast<const std::byte*>(p); };
  for (int64_t i = 0; i < whole; ++i) {
    right.tiles[i] = as_bytes(groups.keys[g]) + i * kTileBytes;
    right.stride[i] = as_bytes(groups.keys[g + 1]) - as_bytes(groups.keys[g]);
    if (next != nullptr && as_bytes(next->keys[g + 1]) - as_bytes(next->keys[g]) == right.stride[i])
      right.ahead[i] = as_bytes(next->keys[g]) + i * kTileBytes;
  }
  if (tail > 0) {
    for (int64_t i = 0; i < 2; ++i) {
      uint16_t* to = tails_ + (g + i) * kStep * kKvLanes;
      std::fill(std::copy_n(groups.keys[g + i] + whole * kStep * kKvLanes, tail * kKvLanes, to), to + kStep * kKvLanes,
                uint16_t{0});
    }
    right.tiles[whole] = as_bytes(tails_ + g * kStep * kKvLanes);
    right.stride[whole] = kTileBytes;
  }
  const auto* x = q_ + pair.first / kPairRows * steps * kPairRows * kStep;
  products(tiles, pair, x, steps, 2, right, scores_ + g * kPairFloats, true);
}

// The softmax of some rows at a time, so that one row's sums and maxima do not wait for another's.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::softmax(const Pair& pair, const Groups& groups, const RowState& state) {
  const bool all = seen(pair.first, groups.tile).end == kTile &&
                   seen(pair.first + pair.rows - 1, groups.tile).begin == 0;  // is seen by all rows
  for (int64_t row = 0; row < pair.rows; row += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, pair.rows - row);
    all ? weigh_rows<true>(pair, groups, state, row, count) : weigh_rows<false>(pair, groups, state, row, count);
  }
}

template <typename S, typename Tiles>
template <bool kAll>
void TileAttention<S, Tiles>::weigh_rows(const Pair& pair, const Groups& groups, const RowState& state, int64_t row,
                                         int64_t count) {
  const int64_t first = pair.first + row;
  const auto mine = [&](int64_t r) { return kAll ? Range{0, kTile} : seen(first + r, groups.tile); };
  raise_tops<kAll>(mine, row, count, groups.tile, first, state.top + first, state.sum + first);
  V sums[kRowsAtOnce];
  std::fill(sums + count, sums + kRowsAtOnce, S::zero());
  for (int64_t r = 0; r < count; ++r) sums[r] = weigh_row<kAll>(mine(r), groups.used, row + r, state.top[first + r]);
  float* const sum = state.sum + first;
  store_lanes<S>(sum, S::add(load_lanes<S>(sum, count), S::reduce_add(sums)), count);
}

// Calls f<kWhole>(step) for the steps of a tile of which some tokens are seen; kWhole: all of them. kAll: of the tile.
template <typename S, typename Tiles>
template <bool kAll, typename F>
[[gnu::always_inline]] inline void TileAttention<S, Tiles>::each_seen(Range seen, F f) {
  if (kAll) {
#pragma GCC unroll 4
    for (int64_t step = 0; step < kSteps; ++step) f.template operator()<true>(step);
    return;
  }
  for (int64_t step = seen.begin / kStep; step * kStep < seen.end; ++step)
    seen.begin <= step * kStep && (step + 1) * kStep <= seen.end ? f.template operator()<true>(step)
                                                                 : f.template operator()<false>(step);
}

// Lanes of the group of tokens from i on that are seen, `otherwise` in the others.
template <typename S, typename Tiles>
template <bool kWhole>
[[gnu::always_inline]] inline typename S::V TileAttention<S, Tiles>::kept(Range seen, int64_t i, V v, V otherwise) {
  if constexpr (kWhole) return v;
  const auto first_lanes = [](int64_t n) { return S::first_lanes(std::clamp<int64_t>(n, 0, S::kWidth)); };
  return S::select(first_lanes(seen.begin - i), otherwise, S::select(first_lanes(seen.end - i), v, otherwise));
}

// Maxima of some rows, the first of which is `first` in the item, follow the scores of the tile, and what was gathered
// follows the maxima.
template <typename S, typename Tiles>
template <bool kAll, typename Seen>
void TileAttention<S, Tiles>::raise_tops(const Seen& mine, int64_t row, int64_t count, int64_t tile, int64_t first,
                                         float* top, float* sum) {
  const bool changes = rows_.changes_scores();
  V tops[kRowsAtOnce];
  std::fill(tops + count, tops + kRowsAtOnce, S::set1(kLowest));
  for (int64_t r = 0; r < count; ++r) {
    float* const scores = scores_ + (row + r) * kKvLanes;
    V highest = S::set1(kLowest);
    const Range range = mine(r);
    const int64_t item_row = first + r;
    each_seen<kAll>(range, [&]<bool kWhole>(int64_t step) __attribute__((always_inline)) {
      float* at = scores + 2 * step * kPairFloats;
#pragma GCC unroll 2
      for (int64_t i = step * kStep; i < (step + 1) * kStep; i += S::kWidth, at += kPairFloats) {
        if (changes)
          S::store(at, rows_.template changed<S>(S::load(at), slopes_[item_row], tile + i, seen_[item_row].end));
        highest = S::max(highest, kept<kWhole>(range, i, S::load(at), S::set1(kLowest)));
      }
    });
    tops[r] = highest;
  }
  const V old = load_lanes<S>(top, count), highest = S::reduce_max(tops),
          now = S::select(S::less(old, highest), highest, old);
  store_lanes<S>(top, now, count);
  if (fresh_) return;  // nothing was gathered
  const V factor = S::select(S::less(old, now), exp<S>(S::sub(old, now)), S::set1(1.0f));
  float factors[kRowsAtOnce];
  store_lanes<S>(factors, factor, count);
  if (std::all_of(factors, factors + count, [](float each) { return each == 1.0f; })) return;
  store_lanes<S>(sum, S::mul(load_lanes<S>(sum, count), factor), count);
  const int64_t all = panels(kv_);
  for (int64_t r = 0; r < count; ++r) {
    float* out = out_ + (row + r) * kKvLanes;
    const V each = S::set1(factors[r]);
    for (int64_t panel = 0; panel < all; ++panel, out += kPairFloats) S::store(out, S::mul(S::load(out), each));
  }
}

// Scores of a row become weights, zero where it sees nothing. Their sum, by lanes.
template <typename S, typename Tiles>
template <bool kAll>
typename S::V TileAttention<S, Tiles>::weigh_row(Range mine, Range used, int64_t row, float top) {
  const float* const scores = scores_ + row * kKvLanes;
  uint16_t* const p = p_ + row * kStep;
  const auto store = [p](int64_t step, V first, V second) __attribute__((always_inline)) {
    uint16_t* const to = p + step * kPairRows * kStep;
    if constexpr (requires { S::store_bf16(to, first, second); }) {
      S::store_bf16(to, first, second);
    } else {
      S::store_bf16(to, first);
      S::store_bf16(to + S::kWidth, second);
    }
  };
  for (int64_t step = used.begin; step * kStep < mine.begin; ++step) store(step, S::zero(), S::zero());
  for (int64_t step = used.end; --step * kStep >= mine.end;) store(step, S::zero(), S::zero());
  const V to_bits = S::set1(1.44269504f), offset = S::set1(-1.44269504f * top);
  V sums = S::zero();
  each_seen<kAll>(mine, [&]<bool kWhole>(int64_t step) __attribute__((always_inline)) {
    V weights[2];
#pragma GCC unroll 2
    for (int64_t g = 0; g < 2; ++g) {
      const V score = S::load(scores + (2 * step + g) * kPairFloats);
      weights[g] =
          kept<kWhole>(mine, step * kStep + g * kKvLanes, weight_of<S>(S::fma(score, to_bits, offset)), S::zero());
      sums = S::add(sums, weights[g]);
    }
    store(step, weights[0], weights[1]);
  });
  return sums;
}

// out += p x values. Steps that all rows see whole come from the cache, where their lines lie together there.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::weigh(Tiles& tiles, const Pair& pair, const Groups& groups, const Groups* next) {
  const Range used = groups.used, first = seen(pair.first, groups.tile),
              last = seen(pair.first + pair.rows - 1, groups.tile);
  CacheTiles<S> right{};
  const auto as_bytes = [](const uint16_t* p) { return reinterpret_cast<const std::byte*>(p); };
  for (int64_t step = used.begin; step < used.end; ++step) {
    const int64_t i = step - used.begin, begin = step * kStep,
                  cached = kKvLanes * kv_.block_size * int64_t{sizeof(uint16_t)};
    const bool whole = last.begin <= begin && begin + kStep <= first.end;
    if (whole && groups.values[2 * step + 1] - groups.values[2 * step] == kKvLanes * kKvLanes) {
      right.tiles[i] = as_bytes(groups.values[2 * step]);
      right.stride[i] = cached;
      if (next != nullptr) right.ahead[i] = as_bytes(next->values[2 * step]);
      continue;
    }
    if (!copy_values(step, {first.begin, last.end}, groups) && !whole) return weigh_apart(tiles, pair, groups);
    right.tiles[i] = as_bytes(copies_ + step * kStep * kv_.padded_dim);
    right.stride[i] = kTileBytes;
  }
  products(tiles, pair, p_ + used.begin * kPairRows * kStep, used.end - used.begin, panels(kv_), right, out_, fresh_);
  fresh_ = false;
}

// The same with values that not all rows see and that are not finite: each row by itself, with zeros for what it does
// not see. A row gets the bits that it would get otherwise.
template <typename S, typename Tiles>
void TileAttention<S, Tiles>::weigh_apart(Tiles& tiles, const Pair& pair, const Groups& groups) {
  const Range used = groups.used;
  const int64_t count = panels(kv_);
  if (fresh_) clear_out();
  for (int64_t row = 0; row < pair.rows; ++row) {
    CacheTiles<S> right{};
    for (int64_t step = used.begin; step < used.end; ++step) {
      copy_values(step, seen(pair.first + row, groups.tile), groups);
      right.tiles[step - used.begin] = reinterpret_cast<const std::byte*>(copies_ + step * kStep * kv_.padded_dim);
      right.stride[step - used.begin] = kTileBytes;
    }
    std::copy_n(out_, count * kPairFloats, apart_);
    products(tiles, pair, p_ + used.begin * kPairRows * kStep, used.end - used.begin, count, right, apart_, false);
    for (int64_t panel = 0; panel < count; ++panel) {
      const int64_t at = panel * kPairFloats + row * kKvLanes;
      S::store(picked_ + at, S::load(apart_ + at));
    }
  }
  std::copy_n(picked_, count * kPairFloats, out_);
}

// Values of a step, zeros for tokens outside `seen`; whether all of them are finite.
template <typename S, typename Tiles>
bool TileAttention<S, Tiles>::copy_values(int64_t step, Range seen, const Groups& groups) {
  constexpr uint32_t kLow = 0xFFFFu, kExponents = 0x7F807F80u, kOnes = 0x00800080u;  // of a line's pairs
  uint32_t spoilt[kKvLanes] = {};  // top bits: some exponent was all ones before one more bit was added
  for (int64_t panel = 0; panel < panels(kv_); ++panel) {
    uint16_t* to = copies_ + (step * panels(kv_) + panel) * kStep * kKvLanes;
    for (int64_t token = step * kStep; token < (step + 1) * kStep; token += 2, to += 2 * kKvLanes) {
      const auto kept = [seen](int64_t t) { return seen.begin <= t && t < seen.end ? kLow : 0u; };
      const uint32_t mask = kept(token) | kept(token + 1) << 16;
      uint32_t pairs[kKvLanes];
      std::memcpy(pairs,
                  value_line(groups.values[token / kKvLanes], token % kKvLanes) + panel * kKvLanes * kv_.block_size,
                  sizeof(pairs));
      for (uint32_t& pair : pairs) pair &= mask;
      for (int64_t i = 0; i < kKvLanes; ++i) spoilt[i] |= (pairs[i] & kExponents) + kOnes;
      std::memcpy(to, pairs, sizeof(pairs));
    }
  }
  return std::ranges::none_of(spoilt, [](uint32_t bits) { return (bits & 0x80008000u) != 0; });
}

template <typename S, typename Tiles>
void paged_attention_tiles(const PagedAttentionArgs& args, const Team& team) {
  PagedAttention<S, TileAttention<S, Tiles>>(args).run(team);
}

template <typename S, typename Tiles>
size_t paged_attention_tiles_scratch(const void* args) {
  return PagedAttention<S, TileAttention<S, Tiles>>::shared_bytes(static_cast<const PagedAttentionArgs*>(args)->kv);
}

}  // namespace
}  // namespace ingot
