// Causal attention over the paged KV cache in float32: an online softmax over tiles of 64 tokens, anchored to positions
// whatever the size of the cache's blocks. Items, splits and threads: paged_attention_rows.h.
//
//   tile       |g0|g1|g2|g3|     groups of 16 tokens, each inside one block; scores [rows][64] = q . K,
//                                then output += p . V
//
// Every row runs through the same operations in the same order whatever rows share its registers, its item, its step
// or its thread: lanes beyond a row's position, or before its window, are selected away, never multiplied, so slots
// there may hold anything, the other half of a pair too. Tiles before the windows of all rows of an item are skipped.
//
// Floors, of a row, token and head: 4 * head_dim operations by FMA; 2 * head_dim * itemsize bytes per token and KV
// head, and 8 of scales in a cache of codes, which decode reads once. Widening a line takes the ports of FMAs (AVX-512,
// bf16: an eighth of the FMAs of 8 rows), so of the rows of an item, which share a tile, the first ones leave lines
// widened to the others, in a panel of 8 KB or so; and so does the softmax, an eighth to a sixth of the FMAs at
// head_dim 64. Codes are multiplied as floats. Their scales never touch a code: a key's scale multiplies the
// finished sum over the dims, before the soft cap; a value's scale multiplies the weight, after the weight went into
// the sum of weights.
#pragma once

#include <utility>

#include "attention/paged_attention_passes.h"
#include "attention/paged_attention_softmax.h"

namespace ingot {
namespace {

// Keeps the compiler from holding lines in registers that sums need: a load of the other half costs less than a spill.
[[gnu::always_inline]] inline void load_anew() { asm volatile("" : : : "memory"); }

// Where products take lines of keys or values from: the cache; the cache, leaving them widened in the panel; the panel.
enum class Lines { kCached, kKept, kPanel };

// Rows at once: beside kRows x kVectors sums a half line, a broadcast and a mask fit into the registers.
template <typename S>
constexpr int kFloatRows = S::kRegisters >= 32   ? 12
                           : S::kRegisters >= 16 ? 6
                                                 : 2;

template <typename S, typename T>
class FloatAttention : AttentionPasses<S, T, 64, kFloatRows<S>, false> {
  using Passes = AttentionPasses<S, T, 64, kFloatRows<S>, false>;
  using Passes::kGroups, Passes::kRows, Passes::kTile;
  using Passes::kv_, Passes::rows_, Passes::seen_begin_, Passes::seen_end_, Passes::slopes_;
  using typename Passes::Tile;

 public:
  using V = typename S::V;
  using Passes::kItemRows, Passes::expect;
  static constexpr bool kSetsOut = false, kDividesOnce = false;
  static constexpr int kVectors = kKvLanes / S::kWidth;  // of a half line
  // Groups of tokens, or of dims, at once. A row alone waits for memory, which is read fastest line after line.
  static constexpr int groups_for(int rows) {
    int groups = rows == 1 ? 1 : kGroups;
    while (groups > 1 && (rows + 1) * groups * kVectors + 2 > S::kRegisters) groups /= 2;
    return groups;
  }
  static constexpr int kPanelGroups = groups_for(kRows);
  // Whether products are about as fast as memory; with vectors of 8 lanes they take twice as long.
  static constexpr bool kMemoryBound = S::kRegisters >= 32;
  static constexpr int64_t kNear = 512 / sizeof(T);  // what few rows fetch from L2, ahead of its use
  static constexpr int kFewestRows = 4;
  // Between queries, whatever head_dim is (512 at most), so that a register and constants are their addresses; no power
  // of two, which would share few cache sets.
  static constexpr int64_t kQueryStride = 512 + kKvLanes;

  explicit FloatAttention(const AttentionRows& rows) : Passes(rows) {}

  static int64_t floats(const PagedKv& kv) {
    const int64_t lines = kv.head_dim > kTile ? kv.head_dim : kTile;
    return kItemRows * (kQueryStride + kTile + 1) + lines * kPanelGroups * kKvLanes;
  }
  void allocate(float* memory) {
    q_ = memory;
    p_ = q_ + kItemRows * kQueryStride;
    factors_ = p_ + kItemRows * kTile;
    panel_ = factors_ + kItemRows;
  }

  void load_queries(const AttentionItem& item, float* rotated);
  void attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state);

 private:
  // A line of the next tile: to L1 where the fewest rows read it soon, else to L2, and from there what is near.
  template <int kR, Lines kLines>
  [[gnu::always_inline]] static inline void fetch_lines(const T* line, const T* ahead) {
    constexpr bool kCached = kMemoryBound && kLines == Lines::kCached;
    if constexpr (kCached && kR <= kFewestRows) {
      S::prefetch(ahead);
    } else {
      if constexpr (kCached) S::prefetch(line + kNear);
      S::prefetch_far(ahead);
    }
  }
  void attend_whole(int64_t rows, const Tile& tile, const Tile& next, const RowState& state);
  void attend_rows(int64_t first, int64_t rows, const Tile& tile, const Tile& next, const RowState& state);
  template <int kR>
  void score(int64_t first, int64_t groups, const Tile& tile, const Tile& next);
  template <int kR, int kG, Lines kLines>
  [[gnu::noinline]] void score_groups(int64_t first, int64_t group, const Tile& tile, const Tile& next);
  template <bool kWhole>
  void softmax(int64_t first, int64_t rows, const Tile& tile, const Tile& next, const RowState& state);
  template <int kR>
  void weigh(int64_t first, int64_t begin, int64_t end, const Tile& tile, const Tile& next,
             const RowState& state) const;
  template <int kR, int kG, Lines kLines>
  [[gnu::noinline]] void weigh_dims(int64_t first, int64_t begin, int64_t end, int64_t at, const Tile& tile,
                                    const Tile& next, const RowState& state) const;

  float* q_ = nullptr;        // [kItemRows][kQueryStride], scaled
  float* p_ = nullptr;        // [kItemRows][kTile]
  float* factors_ = nullptr;  // [kItemRows], by which what rows have gathered so far is still to be multiplied
  float* panel_ = nullptr;    // [dims of keys or tokens of values][kPanelGroups][16]
};

template <typename S, typename T>
void FloatAttention<S, T>::load_queries(const AttentionItem& item, float* rotated) {
  rows_.tokens(item, rotated, [&](const AttentionRows::TokenRows& token) {
    const float* q = token.queries;
    const V scale = S::set1(rows_.scale(token.visible));
    for (int64_t row = token.begin - item.begin; row < token.end - item.begin; ++row, q += kv_.head_dim) {
      this->set_row(item, row, token);
      float* scaled = q_ + row * kQueryStride;
      for (int64_t i = 0; i < kv_.head_dim; i += S::kWidth) {
        const int64_t n = kv_.head_dim - i;
        store_lanes<S>(scaled + i, S::mul(load_lanes<S>(q + i, n), scale), n);
      }
    }
  });
}

template <typename S, typename T>
void FloatAttention<S, T>::attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state) {
  this->each_tile(
      item, begin, end,
      [&](int64_t rows, const Tile& tile, const Tile& next) { attend_whole(rows, tile, next, state); },
      [&](int64_t first, int64_t rows, const Tile& tile, const Tile& next) {
        attend_rows(first, rows, tile, next, state);
      });
}

// A tile that all rows of the item see. Where these take several passes, the first one leaves the lines to the others,
// a panel after the other.
template <typename S, typename T>
void FloatAttention<S, T>::attend_whole(int64_t rows, const Tile& tile, const Tile& next, const RowState& state) {
  if (rows <= kRows) {
    with_count<kRows>(rows, [&]<int kR>() { score<kR>(0, kGroups, tile, next); });
    softmax<true>(0, rows, tile, next, state);
    with_count<kRows>(rows, [&]<int kR>() { weigh<kR>(0, 0, kTile, tile, next, state); });
    return;
  }
  const int64_t passes = (rows + kRows - 1) / kRows, step = (rows + passes - 1) / passes;
  const auto in_passes = [&](auto pass) {
    with_count<kRows, kRows / 2 + 1>(step, [&]<int kR>() { pass.template operator()<kR, Lines::kKept>(0); });
    for (int64_t first = step; first < rows; first += step)
      with_count<kRows>(rows - first < step ? rows - first : step,
                        [&]<int kR>() { pass.template operator()<kR, Lines::kPanel>(first); });
  };
  for (int64_t group = 0; group < kGroups; group += kPanelGroups)
    in_passes(
        [&]<int kR, Lines kLines>(int64_t first) { score_groups<kR, kPanelGroups, kLines>(first, group, tile, next); });
  softmax<true>(0, rows, tile, next, state);
  int64_t at = 0;
  for (; at + kPanelGroups * kKvLanes <= kv_.padded_dim; at += kPanelGroups * kKvLanes)
    in_passes([&]<int kR, Lines kLines>(int64_t first) {
      weigh_dims<kR, kPanelGroups, kLines>(first, 0, kTile, at, tile, next, state);
    });
  if constexpr (kPanelGroups > 1)
    for (; at < kv_.padded_dim; at += kKvLanes)
      in_passes([&]<int kR, Lines>(int64_t first) {
        weigh_dims<kR, 1, Lines::kCached>(first, 0, kTile, at, tile, next, state);
      });
}

// One tile for up to kRows rows of the item, which meanwhile fetches the next one from memory.
template <typename S, typename T>
void FloatAttention<S, T>::attend_rows(int64_t first, int64_t rows, const Tile& tile, const Tile& next,
                                       const RowState& state) {
  const auto inside = [&](int64_t n) { return n < tile.begin ? 0 : n < tile.begin + kTile ? n - tile.begin : kTile; };
  // tokens of the tile that a row sees: [begin(row), end(row)), both ascend with the row
  const auto begin = [&](int64_t row) { return inside(seen_begin_[first + row]); };
  const auto end = [&](int64_t row) { return inside(seen_end_[first + row]); };
  const int64_t most = end(rows - 1), shared_begin = begin(rows - 1), shared_end = end(0);
  if (most == 0 || begin(0) == kTile) return;
  with_count<kRows>(rows, [&]<int kR>() { score<kR>(first, (most + kKvLanes - 1) / kKvLanes, tile, next); });
  softmax<false>(first, rows, tile, next, state);
  for (int64_t row = first; row < first + rows; ++row) {
    if (factors_[row] == 1.0f) continue;
    float* out = state.out + row * kv_.padded_dim;
    const V factor = S::set1(factors_[row]);
    for (int64_t i = 0; i < kv_.padded_dim; i += S::kWidth) S::store(out + i, S::mul(S::load(out + i), factor));
    factors_[row] = 1.0f;
  }
  const auto weigh_part = [&](int64_t from_row, int64_t to_row, int64_t from, int64_t to, const Tile& ahead) {
    with_count<kRows>(to_row - from_row, [&]<int kR>() { weigh<kR>(first + from_row, from, to, tile, ahead, state); });
  };
  if (shared_begin >= shared_end) {
    for (int64_t row = 0; row < rows; ++row)
      if (begin(row) < end(row)) weigh_part(row, row + 1, begin(row), end(row), tile);
    return;
  }
  for (int64_t row = 0; row < rows; ++row)  // tokens that only rows up to this one see
    if (row + 1 < rows && begin(row) < begin(row + 1)) weigh_part(0, row + 1, begin(row), begin(row + 1), tile);
  weigh_part(0, rows, shared_begin, shared_end, next);
  for (int64_t row = 1; row < rows; ++row)  // and only those from this one on
    if (end(row - 1) < end(row)) weigh_part(row, rows, end(row - 1), end(row), tile);
}

// p[row][token] = q[row] . K[:, token] of so many groups; dims ascend. Where keys are codes, times their scale.
template <typename S, typename T>
template <int kR>
void FloatAttention<S, T>::score(int64_t first, int64_t groups, const Tile& tile, const Tile& next) {
  constexpr int kG = groups_for(kR);
  int64_t group = 0;
  for (; group + kG <= groups; group += kG) score_groups<kR, kG, Lines::kCached>(first, group, tile, next);
  if constexpr (kG > 1)
    for (; group < groups; ++group) score_groups<kR, 1, Lines::kCached>(first, group, tile, next);
}

template <typename S, typename T>
template <int kR, int kG, Lines kLines>
void FloatAttention<S, T>::score_groups(int64_t first, int64_t group, const Tile& tile, const Tile& next) {
  constexpr int kN = kG * kVectors;
  const int64_t dim = kv_.head_dim;
  const float* q = q_ + first * kQueryStride;
  float* panel = panel_;
  float* p = p_ + first * kTile + group * kKvLanes;
  V sums[kR][kN];
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) sums[r][j] = S::zero();
  const T* lines[kG];
#pragma GCC unroll 16
  for (int g = 0; g < kG; ++g) lines[g] = tile.keys[group + g];
  const auto one_dim = [&]<int kHalf>(int64_t d) __attribute__((always_inline)) {
    V k[kN];
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) {
      if constexpr (kLines == Lines::kPanel)
        k[j] = S::load(panel + (kHalf * kN + j) * S::kWidth);
      else
        k[j] = load_half<S, kHalf>(lines[j / kVectors] + j % kVectors * S::kWidth * kPair<T>);
      if constexpr (kLines == Lines::kKept) S::store(panel + (kHalf * kN + j) * S::kWidth, k[j]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r) {
      const V each = S::set1(q[r * kQueryStride + d + kHalf]);
#pragma GCC unroll 16
      for (int j = 0; j < kN; ++j) {
        V sum = sums[r][j];
        S::accumulate(sum, each, k[j]);
        sums[r][j] = sum;
      }
    }
  };
  constexpr int kParts = kLines == Lines::kPanel ? 1 : kG;
  for (int part = 0; part < kParts;
       ++part) {  // the next tile's groups one after the other: memory is read fastest in order
    const T* ahead = next.keys[group + part];
    const auto first_dim = [dim](int64_t p) { return dim / kPair<T> * p / kParts * kPair<T>; };
    for (int64_t d = first_dim(part); d < first_dim(part + 1); d += kPair<T>) {
      one_dim.template operator()<0>(d);
      if constexpr (kPair<T> == 2) {
        if constexpr (kLines != Lines::kPanel) load_anew();
        one_dim.template operator()<1>(d);
      }
      panel += kPair<T> * kN * S::kWidth;
      if constexpr (kLines != Lines::kPanel) {
#pragma GCC unroll 16
        for (int g = 0; g < kG; ++g) {
          fetch_lines<kR, kLines>(lines[g], ahead + g * kLine<T>);
          lines[g] += kLine<T>;
        }
        ahead += kG * kLine<T>;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) {
      if constexpr (kScaled<T>)
        sums[r][j] = S::mul(sums[r][j], S::load(tile.key_scales[group + j / kVectors] + j % kVectors * S::kWidth));
      S::store(p + r * kTile + j * S::kWidth, sums[r][j]);
    }
}

// p of the tokens that rows see becomes exp(p - top), where values are codes times their scale; top and sum follow a
// new maximum, by which what was gathered so far is still to be multiplied. kWhole: the rows see the whole tile.
// Memory, which would be idle, is asked meanwhile for the first dims of the next tile's values.
template <typename S, typename T>
template <bool kWhole>
void FloatAttention<S, T>::softmax(int64_t first, int64_t rows, const Tile& tile, const Tile& next,
                                   const RowState& state) {
  const auto inside = [&](int64_t n) { return n < tile.begin ? 0 : n < tile.begin + kTile ? n - tile.begin : kTile; };
  constexpr int64_t kTokensOfLine = 64 / (kKvLanes * sizeof(T));  // of memory
  int64_t asked = 0;                                              // tokens
  softmax_rows<S, kTile, kWhole>(
      rows, p_ + first * kTile, rows_.changes_scores(),
      [&](int64_t row, int64_t i, V scores) {
        return rows_.template changed<S>(scores, slopes_[first + row], tile.begin + i, seen_end_[first + row]);
      },
      state.top + first, state.sum + first, factors_ + first,
      [&](int64_t row) { return std::pair(inside(seen_begin_[first + row]), inside(seen_end_[first + row])); },
      [&](float* p, int64_t i, V weights) {
        if (kWhole && kMemoryBound && asked < kTile) {
          S::prefetch_far(next.values[asked / kKvLanes] + asked % kKvLanes * kKvLanes);
          asked += kTokensOfLine;
        }
        if constexpr (kScaled<T>)  // lanes that the row does not see are never read
          S::store(p + i, S::mul(weights, S::load(tile.value_scales[i / kKvLanes] + i % kKvLanes)));
        else
          S::store(p + i, weights);
      });
}

// out[row] = out[row] * factor + p[row][token] * V[token] for tokens begin .. end-1, ascending.
template <typename S, typename T>
template <int kR>
void FloatAttention<S, T>::weigh(int64_t first, int64_t begin, int64_t end, const Tile& tile, const Tile& next,
                                 const RowState& state) const {
  constexpr int kG = groups_for(kR);
  int64_t at = 0;
  for (; at + kG * kKvLanes <= kv_.padded_dim; at += kG * kKvLanes)
    weigh_dims<kR, kG, Lines::kCached>(first, begin, end, at, tile, next, state);
  if constexpr (kG > 1)
    for (; at < kv_.padded_dim; at += kKvLanes)
      weigh_dims<kR, 1, Lines::kCached>(first, begin, end, at, tile, next, state);
}

// Of kG times 16 dims from `at` on.
template <typename S, typename T>
template <int kR, int kG, Lines kLines>
void FloatAttention<S, T>::weigh_dims(int64_t first, int64_t begin, int64_t end, int64_t at, const Tile& tile,
                                      const Tile& next, const RowState& state) const {
  constexpr int kN = kG * kVectors;
  const int64_t dim = kv_.padded_dim, next_dims = kKvLanes * kv_.block_size;
  const float* p = p_ + first * kTile;
  const float* factors = factors_ + first;
  float* out = state.out + first * dim + at;
  float* panel = panel_;
  V sums[kR][kN];
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r) {
    const V factor = S::set1(factors[r]);
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) sums[r][j] = S::mul(S::load(out + j * S::kWidth), factor);
    out += dim;
  }
  const auto one_token = [&]<int kHalf>(const T* line, int64_t t) __attribute__((always_inline)) {
    V v[kN];
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) {
      if constexpr (kLines == Lines::kPanel)
        v[j] = S::load(panel + (kHalf * kN + j) * S::kWidth);
      else
        v[j] = load_half<S, kHalf>(line + j / kVectors * next_dims + j % kVectors * S::kWidth * kPair<T>);
      if constexpr (kLines == Lines::kKept) S::store(panel + (kHalf * kN + j) * S::kWidth, v[j]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r) {
      const V each = S::set1(p[r * kTile + t]);
#pragma GCC unroll 16
      for (int j = 0; j < kN; ++j) {
        V sum = sums[r][j];
        S::accumulate(sum, each, v[j]);
        sums[r][j] = sum;
      }
    }
  };
  if constexpr (kLines == Lines::kPanel) {
    for (int64_t t = 0; t < kTile; ++t, panel += kN * S::kWidth) one_token.template operator()<0>(nullptr, t);
  } else {
    for (int64_t t = begin; t < end;) {
      const int64_t group = t / kKvLanes, stop = group * kKvLanes + kKvLanes < end ? group * kKvLanes + kKvLanes : end;
      const int64_t place = at * kv_.block_size, ahead = next.values[group] - tile.values[group];
      const T* line = value_line(tile.values[group], t % kKvLanes) + place;
      if constexpr (kPair<T> == 2) {
        if (t % 2 == 1) {
          one_token.template operator()<1>(line, t++);
          line += kLine<T>;
        }
      }
      for (; t + kPair<T> <= stop; t += kPair<T>, line += kLine<T>, panel += kPair<T> * kN * S::kWidth) {
        one_token.template operator()<0>(line, t);
        if constexpr (kPair<T> == 2) {
          load_anew();
          one_token.template operator()<1>(line, t + 1);
        }
#pragma GCC unroll 16
        for (int g = 0; g < kG; ++g) {
          fetch_lines<kR, kLines>(line + g * next_dims, line + ahead + g * next_dims);
        }
      }
      if (t < stop) one_token.template operator()<0>(line, t++);
    }
  }
  asm("" : "+r"(out));  // else the compiler keeps the address of every row, in vector registers
#pragma GCC unroll 16
  for (int r = kR - 1; r >= 0; --r) {
    out -= dim;
#pragma GCC unroll 16
    for (int j = 0; j < kN; ++j) S::store(out + j * S::kWidth, sums[r][j]);
  }
}

template <typename S, typename T>
void paged_attention(const PagedAttentionArgs& args, const Team& team) {
  PagedAttention<S, FloatAttention<S, T>>(args).run(team);
}

template <typename S, typename T>
size_t paged_attention_scratch(const void* args) {
  return PagedAttention<S, FloatAttention<S, T>>::shared_bytes(static_cast<const PagedAttentionArgs*>(args)->kv);
}

}  // namespace
}  // namespace ingot
