// Causal attention over a KV cache of bf16 or of codes by the CPU's dot product of bf16: scaled queries and
// weights are rounded to bf16, sums are float32; an online softmax over tiles of 128 tokens. Passes over tiles:
// paged_attention_passes.h.
//
//   scores [rows][128 tokens]   += q [rows][2 dims] . keys [2 dims][16 tokens]         a line of the cache is the
//   out    [rows][dims]         += p [rows][2 tokens] . values [2 tokens][16 dims]     right operand of one instruction
//
// A row's sums take pairs in ascending order, alone or beside other rows. Of a pair of tokens of which a row sees one,
// the other value is masked away: it may be anything. So rows take such pairs by themselves, and whole pairs together.
//
// Codes become bf16 in registers, which holds them exactly. A key's scale multiplies its finished scores, before the
// soft cap; a value's scale multiplies its weight before that is rounded, after it went into the sum of weights.
//
// Floors, of a row, token and head: 4 * head_dim operations at the peak of the dot product; 4 * head_dim bytes per
// token and KV head in bf16, 2 * head_dim + 8 in codes, which decode reads once. Widening 64 codes: by tables 8
// operations for int8, 6 for FP8; without them 12 and 28; most on other ports than the dot product. Many rows widen a
// tile once (paged_attention_widened.h). Weights: 11 operations for 16 of them, at head_dim 64 an eighth of the
// products. So decode waits for memory: loops over a tile ask for the next one, line by line, for L1 if there is room,
// else for L2. Asked for L2 first and for L1 later, it comes more slowly. CPUs that read in order (isa/prefetch.h) are
// always asked for L2, from where short runs of lines come faster.
#pragma once

#include <algorithm>
#include <utility>

#include "attention/paged_attention_passes.h"
#include "attention/paged_attention_weights.h"
#include "attention/paged_attention_widened.h"
#include "isa/broadcasts.h"
#include "isa/by_tables.h"
#include "isa/prefetch.h"

namespace ingot {
namespace {

// Rows at once: beside kRows x 2 sums two lines and a broadcast fit into the registers.
template <typename S>
constexpr int kPairsRows = S::kRegisters >= 32 ? 12 : 2;

template <typename S, typename T>
class PairsAttention : AttentionPasses<S, T, 128, kPairsRows<S>, kScaled<T>> {
  using Passes = AttentionPasses<S, T, 128, kPairsRows<S>, kScaled<T>>;
  using Passes::kGroups, Passes::kRows, Passes::kTile;
  using Passes::kv_, Passes::rows_, Passes::seen_begin_, Passes::seen_end_, Passes::slopes_;
  using typename Passes::Tile;

 public:
  using V = typename S::V;
  using Passes::kItemRows, Passes::expect;
  static_assert(S::kWidth == kKvLanes);
  static constexpr bool kSetsOut = false, kDividesOnce = true;
  // Groups of tokens, or of dims, at once. A row alone waits for memory, which is read fastest line after line.
  static constexpr int groups_for(int rows) { return rows == 1 ? 1 : rows <= 4 && S::kRegisters >= 32 ? 4 : 2; }
  static constexpr int64_t kStep = 2 * S::kWidth;  // tokens whose weights are rounded together
  static constexpr int64_t kReducedRows = 8;
  static constexpr int64_t kPassesOverCodes = 3;  // more of them take longer than to write and read bf16
  // Floats between queries, whatever head_dim is (512 at most); no power of two, which would share few cache sets.
  static constexpr int64_t kQueryStride = 512 / 2 + kKvLanes;

  explicit PairsAttention(const AttentionRows& rows)
      : Passes(rows),
        into_l1_(!reads_in_order() && 2 * kTile * kv_.head_dim * int64_t{sizeof(T)} <= kL1Bytes * 3 / 4) {}

  static int64_t floats(const PagedKv& kv) {
    return kItemRows * (kQueryStride + kTile + 1) + (kScaled<T> ? Widened::floats(kv.padded_dim) : 0);
  }
  void allocate(float* memory) {
    q_ = memory;
    p_ = q_ + kItemRows * kQueryStride;
    factors_ = p_ + kItemRows * kTile;
    if constexpr (kScaled<T>) widened_.allocate(factors_ + kItemRows, kv_.padded_dim);
  }

  void load_queries(const AttentionItem& item, float* rotated);
  void attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state);

 private:
  static constexpr uint32_t kEven = 0x0000FFFFu, kOdd = 0xFFFF0000u;  // what is kept of pairs

  using Widened = WidenedTile<S, kGroups>;

  struct Range {
    int64_t begin, end;
    bool operator==(const Range&) const = default;
  };
  Range seen(int64_t row, const Tile& tile) const {  // tokens of the tile that a row of the item sees; both ascend
    const auto inside = [&](int64_t n) { return std::clamp<int64_t>(n - tile.begin, 0, kTile); };
    return {inside(seen_begin_[row]), inside(seen_end_[row])};
  }

  // Loops read lines of L: those of the cache, or of the widened tile.
  TileLines<T> lines_of(const Tile& tile) const { return {tile.keys, tile.values, kKvLanes * kv_.block_size}; }
  template <typename L>
  void attend_whole(int64_t rows, const Tile& tile, const Tile& next, const TileLines<L>& lines,
                    const TileLines<L>& ahead, const RowState& state);
  template <typename L>
  void attend_rows(int64_t first, int64_t rows, const Tile& tile, const Tile& next, const TileLines<L>& lines,
                   const TileLines<L>& ahead, const RowState& state);
  template <int kR, bool kFetch, typename L>
  void score(int64_t first, int64_t groups, const Tile& tile, const TileLines<L>& lines, const TileLines<L>& ahead);
  template <int kR, int kG, bool kFetch, typename L>
  [[gnu::noinline]] void score_groups(int64_t first, int64_t group, const Tile& tile, const TileLines<L>& lines,
                                      const TileLines<L>& ahead);
  template <bool kAll>
  [[gnu::noinline]] void softmax(int64_t first, int64_t rows, const Tile& tile, const Tile& next,
                                 const RowState& state);
  template <bool kAll, typename F>
  static void each_seen(Range seen, F f);
  template <bool kAll>
  static V kept(Range seen, int64_t i, V v, V otherwise);
  template <bool kAll, typename N>
  void find_tops(int64_t first, N rows, const Tile& tile, const RowState& state);
  template <bool kAll>
  V weigh_scores(int64_t row, const Tile& tile, const RowState& state);
  template <typename N>
  void add_sums(int64_t first, N rows, const V* sums, const RowState& state);
  template <int kR, bool kFetch, typename L>
  void weigh(int64_t first, Range tokens, const TileLines<L>& lines, const TileLines<L>& ahead,
             const RowState& state) const;
  template <int kR, int kG, bool kFetch, typename L>
  [[gnu::noinline]] void weigh_dims(int64_t first, Range tokens, int64_t at, const TileLines<L>& lines,
                                    const TileLines<L>& ahead, const RowState& state) const;

  // Asks for a line of the next tile.
  template <typename L>
  [[gnu::always_inline]] void fetch_line(const L* line) const {
    into_l1_ ? S::prefetch(line) : S::prefetch_far(line);
  }

  const bool into_l1_;        // what is asked for: then L1 has room for the keys of this tile and of the next one
  float* q_ = nullptr;        // [kItemRows][kQueryStride] pairs of dims, scaled
  float* p_ = nullptr;        // [kItemRows][kTile]: scores, then half as many pairs of weights
  float* factors_ = nullptr;  // [kItemRows], by which what rows have gathered so far is still to be multiplied
  Widened widened_;           // of codes
};

template <typename S, typename T>
void PairsAttention<S, T>::load_queries(const AttentionItem& item, float* rotated) {
  rows_.tokens(item, rotated, [&](const AttentionRows::TokenRows& token) {
    const float* q = token.queries;
    const V scale = S::set1(rows_.scale(token.visible));
    for (int64_t row = token.begin - item.begin; row < token.end - item.begin; ++row, q += kv_.head_dim) {
      this->set_row(item, row, token);
      float* pairs = q_ + row * kQueryStride;
      for (int64_t i = 0; i < kv_.head_dim; i += 2 * S::kWidth, pairs += S::kWidth) {
        const int64_t left = kv_.head_dim - i;
        const V first = S::mul(load_lanes<S>(q + i, left), scale);
        const V second =
            left > S::kWidth ? S::mul(load_lanes<S>(q + i + S::kWidth, left - S::kWidth), scale) : S::zero();
        S::store(pairs, S::round_pairs(first, second));
      }
    }
  });
}

// Many passes read codes widened, before the first of them. What comes next is fetched meanwhile, so these passes ask
// for lines that are there.
template <typename S, typename T>
void PairsAttention<S, T>::attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state) {
  const bool widens = kScaled<T> && item.end - item.begin > kPassesOverCodes * kRows;
  const auto widened = [&](const Tile& tile, const Tile& next) {
    widened_.widen(lines_of(tile), lines_of(next), kv_.head_dim, kv_.padded_dim,
                   [&](const T* line) __attribute__((always_inline)) { fetch_line(line); });
    return widened_.lines();
  };
  this->each_tile(
      item, begin, end,
      [&](int64_t rows, const Tile& tile, const Tile& next) {
        if (!widens) return attend_whole(rows, tile, next, lines_of(tile), lines_of(next), state);
        const auto lines = widened(tile, next);
        attend_whole(rows, tile, next, lines, lines, state);
      },
      [&](int64_t first, int64_t rows, const Tile& tile, const Tile& next) {
        if (!widens) return attend_rows(first, rows, tile, next, lines_of(tile), lines_of(next), state);
        const auto lines = first == 0 ? widened(tile, next) : widened_.lines();
        attend_rows(first, rows, tile, next, lines, lines, state);
      });
}

// A tile that all rows of the item see.
template <typename S, typename T>
template <typename L>
void PairsAttention<S, T>::attend_whole(int64_t rows, const Tile& tile, const Tile& next, const TileLines<L>& lines,
                                        const TileLines<L>& ahead, const RowState& state) {
  const int64_t passes = (rows + kRows - 1) / kRows, step = (rows + passes - 1) / passes;
  const auto in_passes = [&](auto pass) {
    with_count<kRows>(step, [&]<int kR>() { pass.template operator()<kR, true>(0); });
    for (int64_t first = step; first < rows; first += step)
      with_count<kRows>(std::min(step, rows - first), [&]<int kR>() { pass.template operator()<kR, false>(first); });
  };
  in_passes([&]<int kR, bool kFetch>(int64_t first) { score<kR, kFetch>(first, kGroups, tile, lines, ahead); });
  softmax<true>(0, rows, tile, next, state);
  in_passes([&]<int kR, bool kFetch>(int64_t first) { weigh<kR, kFetch>(first, {0, kTile}, lines, ahead, state); });
}

// One tile for up to kRows rows of the item.
template <typename S, typename T>
template <typename L>
void PairsAttention<S, T>::attend_rows(int64_t first, int64_t rows, const Tile& tile, const Tile& next,
                                       const TileLines<L>& lines, const TileLines<L>& ahead, const RowState& state) {
  const auto mine = [&](int64_t row) { return seen(first + row, tile); };
  const Range least = mine(0), most = mine(rows - 1);
  if (most.end == 0 || least.begin == kTile) return;
  const int64_t groups = (most.end + kKvLanes - 1) / kKvLanes;
  with_count<kRows>(rows, [&]<int kR>() { score<kR, true>(first, groups, tile, lines, ahead); });
  softmax<false>(first, rows, tile, next, state);
  const auto weigh_rows = [&](int64_t row, int64_t count, Range tokens, const TileLines<L>& then) {
    if (tokens.begin >= tokens.end) return;
    with_count<kRows>(count, [&]<int kR>() { weigh<kR, true>(first + row, tokens, lines, then, state); });
    std::fill_n(factors_ + first + row, count, 1.0f);
  };
  if (least == most) return weigh_rows(0, rows, least, ahead);
  // whole pairs that all rows see, and what is before and behind them
  const Range shared{(most.begin + 1) / 2 * 2, least.end / 2 * 2};
  const bool share = shared.begin < shared.end;
  const auto apart = [&](auto part) {
    for (int64_t row = 0, count = 1; row < rows; row += count, count = 1) {
      while (row + count < rows && mine(row + count) == mine(row)) ++count;
      weigh_rows(row, count, part(mine(row)), lines);
    }
  };
  apart([&](Range all) { return share ? Range{all.begin, shared.begin} : all; });
  if (!share) return;
  weigh_rows(0, rows, shared, ahead);
  apart([&](Range all) { return Range{shared.end, all.end}; });
}

// p[row][token] = q[row] . K[:, token] of so many groups; dims ascend.
template <typename S, typename T>
template <int kR, bool kFetch, typename L>
void PairsAttention<S, T>::score(int64_t first, int64_t groups, const Tile& tile, const TileLines<L>& lines,
                                 const TileLines<L>& ahead) {
  constexpr int kG = groups_for(kR);
  int64_t group = 0;
  for (; group + kG <= groups; group += kG) score_groups<kR, kG, kFetch>(first, group, tile, lines, ahead);
  if constexpr (kG > 1)
    for (; group < groups; ++group) score_groups<kR, 1, kFetch>(first, group, tile, lines, ahead);
}

template <typename S, typename T>
template <int kR, int kG, bool kFetch, typename L>
void PairsAttention<S, T>::score_groups(int64_t first, int64_t group, const Tile& tile, const TileLines<L>& lines,
                                        const TileLines<L>& ahead) {
  const int64_t pairs = kv_.head_dim / 2;
  const float* q = q_ + first * kQueryStride;
  V sums[kR][kG];
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 16
    for (int g = 0; g < kG; ++g) sums[r][g] = S::zero();
  const L* keys[kG];
#pragma GCC unroll 16
  for (int g = 0; g < kG; ++g) keys[g] = lines.keys[group + g];
  // the next tile's groups one after the other: memory is read fastest in order
  constexpr int kLines = kLinesAtOnce<L>;
  const int64_t steps = pairs / kLines;  // head_dim is a multiple of four
  for (int part = 0; part < kG; ++part) {
    const L* next = ahead.keys[group + part];
    for (int64_t i = steps * part / kG; i < steps * (part + 1) / kG; ++i) {
      V k[kG][kLines];
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) load_lines<S, kR>(k[g], keys[g]);
      add_products<S>(sums, q + i * kLines, kQueryStride, k);
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) {
        if constexpr (kFetch) fetch_line(next + g * kLines * kPairLine);
        keys[g] += kLines * kPairLine;
      }
      next += kG * kLines * kPairLine;
    }
  }
  float* p = p_ + first * kTile + group * kKvLanes;
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 16
    for (int g = 0; g < kG; ++g) {
      if constexpr (kScaled<T>) sums[r][g] = S::mul(sums[r][g], S::load(tile.key_scales[group + g]));
      S::store(p + r * kTile + g * kKvLanes, sums[r][g]);
    }
}

// The softmax of rows, in loops whose turns do not wait for each other: maxima of some rows at a time, weights of all,
// sums of some at a time. Memory, which would be idle, is asked meanwhile for the first dims of the next tile's values.
// kAll: all rows see all of the tile.
template <typename S, typename T>
template <bool kAll>
void PairsAttention<S, T>::softmax(int64_t first, int64_t rows, const Tile& tile, const Tile& next,
                                   const RowState& state) {
  constexpr int64_t kTokensOfLine = 64 / (kKvLanes * sizeof(T));  // of memory
  for (int64_t t = 0; kAll && t < kTile; t += kTokensOfLine)
    S::prefetch_far(value_line(next.values[t / kKvLanes], t % kKvLanes));
  V sums[kItemRows];
  const auto some_at_a_time = [rows](auto f) {  // their number is a constant for all but the last ones
    int64_t row = 0;
    for (; row + kReducedRows <= rows; row += kReducedRows) f(row, std::integral_constant<int64_t, kReducedRows>());
    if (row < rows) f(row, rows - row);
  };
  some_at_a_time([&](int64_t row, auto count) { find_tops<kAll>(first + row, count, tile, state); });
  for (int64_t row = 0; row < rows; ++row) sums[row] = weigh_scores<kAll>(first + row, tile, state);
  some_at_a_time([&](int64_t row, auto count) { add_sums(first + row, count, sums + row, state); });
}

// Calls f<kWhole>(token) for the steps of which some tokens are seen; kWhole: all of them. kAll: of the tile.
template <typename S, typename T>
template <bool kAll, typename F>
[[gnu::always_inline]] inline void PairsAttention<S, T>::each_seen(Range seen, F f) {
  if constexpr (kAll) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kTile; i += kStep) f.template operator()<true>(i);
  } else {
    for (int64_t i = seen.begin / kStep * kStep; i < seen.end; i += kStep)
      seen.begin <= i&& i + kStep <= seen.end ? f.template operator()<true>(i) : f.template operator()<false>(i);
  }
}

// Lanes of the group of tokens from i on that are seen, `otherwise` in the others.
template <typename S, typename T>
template <bool kAll>
[[gnu::always_inline]] inline typename S::V PairsAttention<S, T>::kept(Range seen, int64_t i, V v, V otherwise) {
  if constexpr (kAll) return v;
  const auto before = [i](int64_t n) { return S::first_lanes(std::clamp<int64_t>(n - i, 0, S::kWidth)); };
  return S::select(before(seen.begin), otherwise, S::select(before(seen.end), v, otherwise));
}

// The highest scores of up to kReducedRows rows so far, and by which what they have gathered is to be multiplied.
template <typename S, typename T>
template <bool kAll, typename N>
[[gnu::always_inline]] inline void PairsAttention<S, T>::find_tops(int64_t first, N rows, const Tile& tile,
                                                                   const RowState& state) {
  const bool changes = rows_.changes_scores();
  V tops[kReducedRows];
  for (int64_t r = 0; r < rows; ++r) {
    float* const scores = p_ + (first + r) * kTile;
    const Range range = seen(first + r, tile);
    V highest = S::set1(kLowest);
    each_seen<kAll>(range, [&]<bool kWhole>(int64_t step) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int64_t i = step; i < step + kStep; i += S::kWidth) {
        if (changes)
          S::store(scores + i, rows_.template changed<S>(S::load(scores + i), slopes_[first + r], tile.begin + i,
                                                         seen_end_[first + r]));
        highest = S::max(highest, kept<kWhole>(range, i, S::load(scores + i), S::set1(kLowest)));
      }
    });
    tops[r] = highest;
  }
  std::fill(tops + rows, tops + kReducedRows, S::set1(kLowest));
  float* const top = state.top + first;
  const V old = load_lanes<S>(top, rows), highest = S::reduce_max(tops),
          now = S::select(S::less(old, highest), highest, old);
  const V factor = S::select(S::less(old, now), exp<S>(S::sub(old, now)), S::set1(1.0f));
  store_lanes<S>(top, now, rows);
  store_lanes<S>(factors_ + first, factor, rows);
}

// Scores of a row become pairs of weights, zero beside those that it sees. Returns what sums up to theirs.
template <typename S, typename T>
template <bool kAll>
[[gnu::always_inline]] inline typename S::V PairsAttention<S, T>::weigh_scores(int64_t row, const Tile& tile,
                                                                               const RowState& state) {
  float* const scores = p_ + row * kTile;
  const Range range = seen(row, tile);
  const V to_bits = S::set1(1.44269504f), offset = S::set1(-1.44269504f * state.top[row]);
  V total = S::zero();
  each_seen<kAll>(range, [&]<bool kWhole>(int64_t step) __attribute__((always_inline)) {
    V weights[2];
#pragma GCC unroll 2
    for (int64_t g = 0; g < 2; ++g) {
      const int64_t i = step + g * S::kWidth;
      weights[g] = kept<kWhole>(range, i, weight_of<S>(S::fma(S::load(scores + i), to_bits, offset)), S::zero());
      total = S::add(total, weights[g]);
      if constexpr (kScaled<T>) {
        const V scales = S::load(tile.value_scales[i / kKvLanes]);  // of hidden tokens: anything
        weights[g] = kept<kWhole>(range, i, S::mul(weights[g], scales), S::zero());
      }
    }
    S::store(scores + step / 2, S::round_pairs(weights[0], weights[1]));  // over scores that are read
  });
  return total;
}

// sums: of up to kReducedRows rows.
template <typename S, typename T>
template <typename N>
[[gnu::always_inline]] inline void PairsAttention<S, T>::add_sums(int64_t first, N rows, const V* sums,
                                                                  const RowState& state) {
  V all[kReducedRows];
  std::copy(sums, sums + rows, all);
  std::fill(all + rows, all + kReducedRows, S::zero());
  float* const sum = state.sum + first;
  store_lanes<S>(sum, S::fma(load_lanes<S>(sum, rows), load_lanes<S>(factors_ + first, rows), S::reduce_add(all)),
                 rows);
}

// out[row] = out[row] * factor + p[row][pair] . V[pair] for the pairs of tokens, ascending.
template <typename S, typename T>
template <int kR, bool kFetch, typename L>
void PairsAttention<S, T>::weigh(int64_t first, Range tokens, const TileLines<L>& lines, const TileLines<L>& ahead,
                                 const RowState& state) const {
  constexpr int kG = groups_for(kR);
  int64_t at = 0;
  for (; at + kG * kKvLanes <= kv_.padded_dim; at += kG * kKvLanes)
    weigh_dims<kR, kG, kFetch>(first, tokens, at, lines, ahead, state);
  if constexpr (kG > 1)
    for (; at < kv_.padded_dim; at += kKvLanes) weigh_dims<kR, 1, kFetch>(first, tokens, at, lines, ahead, state);
}

// Of kG times 16 dims from `at` on.
template <typename S, typename T>
template <int kR, int kG, bool kFetch, typename L>
void PairsAttention<S, T>::weigh_dims(int64_t first, Range tokens, int64_t at, const TileLines<L>& lines,
                                      const TileLines<L>& ahead, const RowState& state) const {
  const int64_t dim = kv_.padded_dim, next_dims = lines.next_dims;
  const float* p = p_ + first * kTile;
  float* out = state.out + first * dim + at;
  V sums[kR][kG];
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r) {
    const V factor = S::set1(factors_[first + r]);
#pragma GCC unroll 16
    for (int g = 0; g < kG; ++g) sums[r][g] = S::mul(S::load(out + g * kKvLanes), factor);
    out += dim;
  }
  const auto add = [&]<int kLines>(const L* line, int64_t pair, auto kept) __attribute__((always_inline)) {
    V v[kG][kLines];
#pragma GCC unroll 16
    for (int g = 0; g < kG; ++g) {
      load_lines<S, kR>(v[g], line + g * next_dims);
      kept(v[g][0]);
    }
    add_products<S>(sums, p + pair, kTile, v);
  };
  const auto all = [](V&) __attribute__((always_inline)) {};
  const auto even = [](V& pairs) __attribute__((always_inline)) { pairs = S::keep_bits(pairs, kEven); };
  const auto odd = [](V& pairs) __attribute__((always_inline)) { pairs = S::keep_bits(pairs, kOdd); };
  const int64_t place = at / kKvLanes * next_dims;
  const auto line_of = [&](int64_t t) { return value_line(lines.values[t / kKvLanes], t % kKvLanes / 2 * 2) + place; };
  int64_t t = tokens.begin;
  if (t % 2 == 1) {
    add.template operator()<1>(line_of(t), t / 2, odd);
    ++t;
  }
  const int64_t whole = tokens.end / 2 * 2;
  while (t < whole) {
    const int64_t group = t / kKvLanes, stop = std::min((group + 1) * kKvLanes, whole);
    const int64_t next = ahead.values[group] - lines.values[group];
    const L* line = line_of(t);
    constexpr int kLines = kLinesAtOnce<L>;
    for (; t + 2 * kLines <= stop; t += 2 * kLines, line += kLines * kPairLine) {
      add.template operator()<kLines>(line, t / 2, all);
      if constexpr (kFetch) {
#pragma GCC unroll 16
        for (int g = 0; g < kG; ++g) fetch_line(line + next + g * next_dims);
      }
    }
    if (t < stop) {
      add.template operator()<1>(line, t / 2, all);
      t += 2;
    }
  }
  if (t < tokens.end) add.template operator()<1>(line_of(t), t / 2, even);
  asm("" : "+r"(out));  // else the compiler keeps the address of every row, in vector registers
#pragma GCC unroll 16
  for (int r = kR - 1; r >= 0; --r) {
    out -= dim;
#pragma GCC unroll 16
    for (int g = 0; g < kG; ++g) S::store(out + g * kKvLanes, sums[r][g]);
  }
}

template <typename S, typename T>
void paged_attention_pairs(const PagedAttentionArgs& args, const Team& team) {
  PagedAttention<S, PairsAttention<S, T>>(args).run(team);
}

// Of codes. Tables: as S, for CPUs that permute bytes.
template <typename S, typename Tables, typename T>
void paged_attention_codes(const PagedAttentionArgs& args, const Team& team) {
  by_tables<S, Tables>([&]<typename Widening>() { paged_attention_pairs<Widening, T>(args, team); });
}

template <typename S, typename T>
size_t paged_attention_pairs_scratch(const void* args) {
  return PagedAttention<S, PairsAttention<S, T>>::shared_bytes(static_cast<const PagedAttentionArgs*>(args)->kv);
}

}  // namespace
}  // namespace ingot
