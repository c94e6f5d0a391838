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
// Floors, of a row, token and head: 4 * head_dim operations by FMA; 2 * head_dim * itemsize bytes per token and KV head,
// and 8 of scales in an int8 cache, which decode reads once. Prefill reuses a tile for kItemRows rows: 6 rows x 16 lanes
// make 24 FMAs of 4 loads and 12 broadcasts, which leaves an eighth of the FMAs' time for the softmax at head_dim 64.
// int8 codes are multiplied as floats. Their scales never touch a code: a key's scale multiplies the finished sum over
// the dims, before the soft cap; a value's scale multiplies the weight, after the weight went into the sum of weights.
#pragma once

#include "kv_head.h"
#include "paged_attention_rows.h"
#include "paged_attention_softmax.h"

namespace ingot {
namespace {

// Calls f.template operator()<n>() for the n in 1 .. kMost that is asked for.
template <int kMost, typename F>
[[gnu::always_inline]] inline void with_count(int64_t n, F f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f.template operator()<kMost>();
}

// Keeps the compiler from holding lines in registers that sums need: a load of the other half costs less than a spill.
[[gnu::always_inline]] inline void load_anew() { asm volatile("" : : : "memory"); }

template <typename S, typename T>
class FloatAttention {
 public:
  using V = typename S::V;
  static constexpr int64_t kItemRows = 48;
  static constexpr int64_t kTile = 64;
  static constexpr int kGroups = kTile / kKvLanes;
  static constexpr int kVectors = kKvLanes / S::kWidth;  // of a half line
  // Rows at once: beside kRows x kVectors sums a half line, a broadcast and a mask fit into the registers.
  static constexpr int kRows = S::kRegisters >= 32 ? 8 : S::kRegisters >= 16 ? 6 : 2;
  // Groups of tokens, or of dims, at once. A row alone waits for memory, which is read fastest line after line.
  static constexpr int groups_for(int rows) {
    int groups = rows == 1 ? 1 : kGroups;
    while (groups > 1 && (rows + 1) * groups * kVectors + 2 > S::kRegisters) groups /= 2;
    return groups;
  }

  explicit FloatAttention(const AttentionRows& rows) : rows_(rows), kv_(rows.kv) {}

  static int64_t floats(const PagedKv& kv) { return kItemRows * kv.head_dim + kRows * kTile; }
  void allocate(float* memory) {
    p_ = memory;
    q_ = p_ + kRows * kTile;
  }

  void load_queries(const AttentionItem& item, float* turned);
  void attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state);

 private:
  // Where the groups of a tile lie; groups that nobody sees repeat another one's place.
  struct Tile {
    int64_t begin;
    T* keys[kGroups];
    T* values[kGroups];
    const float* key_scales[kGroups];
    const float* value_scales[kGroups];
  };

  Tile locate(const AttentionItem& item, int64_t begin, int64_t end) const;
  void attend_rows(int64_t first, int64_t rows, const Tile& tile, const Tile& next, const RowState& state);
  template <int kR>
  void score(const float* q, int64_t groups, const Tile& tile, const Tile& next);
  template <int kR, int kG>
  void score_groups(const float* q, int64_t group, const Tile& tile, const Tile& next);
  template <bool kWhole>
  void softmax(float* p, int64_t begin, int64_t end, const Tile& tile, const RowState& state, int64_t row) const;
  template <int kR>
  void weigh(const float* p, int64_t begin, int64_t end, const Tile& tile, const Tile& next, float* out) const;
  template <int kR, int kG>
  void weigh_dims(const float* p, int64_t begin, int64_t end, int64_t at, const Tile& tile, const Tile& next, float* out) const;

  const AttentionRows& rows_;
  const PagedKv& kv_;
  float* q_ = nullptr;  // [kItemRows][head_dim], scaled
  float* p_ = nullptr;  // [kRows][kTile]
  int64_t seen_begin_[kItemRows], seen_end_[kItemRows];  // tokens that the item's rows see
};

template <typename S, typename T>
void FloatAttention<S, T>::load_queries(const AttentionItem& item, float* turned) {
  rows_.queries(item, turned, [&](int64_t row, const float* q) {
    seen_begin_[row - item.begin] = rows_.hidden(item.sequence, row);
    seen_end_[row - item.begin] = rows_.visible(item.sequence, row);
    float* scaled = q_ + (row - item.begin) * kv_.head_dim;
    for (int64_t i = 0; i < kv_.head_dim; i += S::kWidth) {
      const int64_t n = kv_.head_dim - i;
      store_lanes<S>(scaled + i, S::mul(load_lanes<S>(q + i, n), S::set1(rows_.args.scale)), n);
    }
  });
}

// The tile from token `begin` on; nobody sees tokens from `end` on.
template <typename S, typename T>
typename FloatAttention<S, T>::Tile FloatAttention<S, T>::locate(const AttentionItem& item, int64_t begin, int64_t end) const {
  Tile tile;
  tile.begin = begin;
  for (int64_t g = 0; g < kGroups; ++g) {
    const int64_t token = begin + g * kKvLanes < end ? begin + g * kKvLanes : begin, slot = token % kv_.block_size;
    const int64_t place = rows_.block(item.sequence, token) * kv_.block_bytes;
    T* keys = reinterpret_cast<T*>(kv_.keys + place) + item.head * kv_head_size<T>(kv_.head_dim, kv_.block_size);
    T* values = reinterpret_cast<T*>(kv_.values + place) + item.head * kv_head_size<T>(kv_.padded_dim, kv_.block_size);
    tile.keys[g] = key_lines(keys, kv_.head_dim, slot);
    tile.values[g] = value_line(values, slot);
    tile.key_scales[g] = kv_scales(keys, kv_.head_dim, kv_.block_size) + slot;
    tile.value_scales[g] = kv_scales(values, kv_.padded_dim, kv_.block_size) + slot;
  }
  return tile;
}

template <typename S, typename T>
void FloatAttention<S, T>::attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state) {
  const int64_t rows = item.end - item.begin, passes = (rows + kRows - 1) / kRows, step = (rows + passes - 1) / passes;
  if (begin >= end) return;
  Tile tile = locate(item, begin / kTile * kTile, end);
  while (tile.begin < end) {
    const bool last = tile.begin + kTile >= end;
    const Tile next = last ? tile : locate(item, tile.begin + kTile, end);
    if constexpr (kScaled<T>) {  // the loops over codes fetch the next tile's codes
      for (int g = 0; g < kGroups; ++g) {
        S::prefetch(next.key_scales[g]);
        S::prefetch(next.value_scales[g]);
      }
    }
    for (int64_t first = 0; first < rows; first += step)
      attend_rows(first, rows - first < step ? rows - first : step, tile, first == 0 ? next : tile, state);
    if (last) return;
    tile = next;
  }
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
  float* out = state.out + first * kv_.padded_dim;
  with_count<kRows>(rows, [&]<int kR>() { score<kR>(q_ + first * kv_.head_dim, (most + kKvLanes - 1) / kKvLanes, tile, next); });
  for (int64_t row = 0; row < rows; ++row) {
    if (begin(row) == 0 && end(row) == kTile) softmax<true>(p_ + row * kTile, 0, kTile, tile, state, first + row);
    else if (begin(row) < end(row)) softmax<false>(p_ + row * kTile, begin(row), end(row), tile, state, first + row);
  }
  const auto weigh_alone = [&](int64_t row, int64_t from, int64_t to) {
    if (from < to) weigh<1>(p_ + row * kTile, from, to, tile, tile, out + row * kv_.padded_dim);
  };
  if (shared_begin >= shared_end) {
    for (int64_t row = 0; row < rows; ++row) weigh_alone(row, begin(row), end(row));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) weigh_alone(row, begin(row), shared_begin);
  with_count<kRows>(rows, [&]<int kR>() { weigh<kR>(p_, shared_begin, shared_end, tile, next, out); });
  for (int64_t row = 0; row < rows; ++row) weigh_alone(row, shared_end, end(row));
}

// p[row][token] = q[row] . K[:, token] of so many groups; dims ascend. Where keys are codes, times their scale.
template <typename S, typename T>
template <int kR>
void FloatAttention<S, T>::score(const float* q, int64_t groups, const Tile& tile, const Tile& next) {
  constexpr int kG = groups_for(kR);
  int64_t group = 0;
  for (; group + kG <= groups; group += kG) score_groups<kR, kG>(q, group, tile, next);
  if constexpr (kG > 1)
    for (; group < groups; ++group) score_groups<kR, 1>(q, group, tile, next);
}

template <typename S, typename T>
template <int kR, int kG>
void FloatAttention<S, T>::score_groups(const float* q, int64_t group, const Tile& tile, const Tile& next) {
  constexpr int kN = kG * kVectors;
  const int64_t dim = kv_.head_dim;
  V sums[kR][kN];
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) sums[r][j] = S::zero();
  const T* lines[kG];
  int64_t ahead[kG];
#pragma GCC unroll 8
  for (int g = 0; g < kG; ++g) {
    lines[g] = tile.keys[group + g];
    ahead[g] = next.keys[group + g] - tile.keys[group + g];
  }
  const auto one_dim = [&]<int kHalf>(int64_t d) __attribute__((always_inline)) {
    V k[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) k[j] = load_half<S, kHalf>(lines[j / kVectors] + j % kVectors * S::kWidth * kPair<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      const V each = S::set1(q[r * dim + d + kHalf]);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) {
        V sum = sums[r][j];
        S::accumulate(sum, each, k[j]);
        sums[r][j] = sum;
      }
    }
  };
  for (int64_t d = 0; d < dim; d += kPair<T>) {
    one_dim.template operator()<0>(d);
    if constexpr (kPair<T> == 2) {
      load_anew();
      one_dim.template operator()<1>(d);
    }
#pragma GCC unroll 8
    for (int g = 0; g < kG; ++g) {
      S::prefetch(lines[g] + ahead[g]);
      lines[g] += kLine<T>;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) {
      const int64_t g = group + j / kVectors, lane = j % kVectors * S::kWidth;
      if constexpr (kScaled<T>) sums[r][j] = S::mul(sums[r][j], S::load(tile.key_scales[g] + lane));
      S::store(p_ + r * kTile + g * kKvLanes + lane, sums[r][j]);
    }
}

// p of the tokens begin .. end-1 becomes exp(p - top), where values are codes times their scale; top, sum and the output so
// far follow a new maximum. kWhole: the row sees the whole tile.
template <typename S, typename T>
template <bool kWhole>
void FloatAttention<S, T>::softmax(float* p, int64_t begin, int64_t end, const Tile& tile, const RowState& state, int64_t row) const {
  softmax_row<S, kTile, kWhole>(
      begin, end, rows_.args.softcap, state.top[row], state.sum[row], [p](int64_t i) { return p + i; },
      [p, &tile](int64_t i, V weights) {
        if constexpr (kScaled<T>)  // lanes that the row does not see are never read
          S::store(p + i, S::mul(weights, S::load(tile.value_scales[i / kKvLanes] + i % kKvLanes)));
        else
          S::store(p + i, weights);
      },
      [this, &state, row](V factor) {
        float* out = state.out + row * kv_.padded_dim;
        for (int64_t i = 0; i < kv_.padded_dim; i += S::kWidth) S::store(out + i, S::mul(S::load(out + i), factor));
      });
}

// out[row] += p[row][token] * V[token] for tokens begin .. end-1, ascending.
template <typename S, typename T>
template <int kR>
void FloatAttention<S, T>::weigh(const float* p, int64_t begin, int64_t end, const Tile& tile, const Tile& next, float* out) const {
  constexpr int kG = groups_for(kR);
  int64_t at = 0;
  for (; at + kG * kKvLanes <= kv_.padded_dim; at += kG * kKvLanes) weigh_dims<kR, kG>(p, begin, end, at, tile, next, out);
  if constexpr (kG > 1)
    for (; at < kv_.padded_dim; at += kKvLanes) weigh_dims<kR, 1>(p, begin, end, at, tile, next, out);
}

// Of kG times 16 dims from `at` on.
template <typename S, typename T>
template <int kR, int kG>
void FloatAttention<S, T>::weigh_dims(const float* p, int64_t begin, int64_t end, int64_t at, const Tile& tile, const Tile& next,
                                      float* out) const {
  constexpr int kN = kG * kVectors;
  const int64_t dim = kv_.padded_dim, next_dims = kKvLanes * kv_.block_size;
  V sums[kR][kN];
  out += at;
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) sums[r][j] = S::load(out + r * dim + j * S::kWidth);
  const auto one_token = [&]<int kHalf>(const T* line, int64_t t) __attribute__((always_inline)) {
    V v[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j)
      v[j] = load_half<S, kHalf>(line + j / kVectors * next_dims + j % kVectors * S::kWidth * kPair<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r) {
      const V each = S::set1(p[r * kTile + t]);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) {
        V sum = sums[r][j];
        S::accumulate(sum, each, v[j]);
        sums[r][j] = sum;
      }
    }
  };
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
    for (; t + kPair<T> <= stop; t += kPair<T>, line += kLine<T>) {
      one_token.template operator()<0>(line, t);
      if constexpr (kPair<T> == 2) {
        load_anew();
        one_token.template operator()<1>(line, t + 1);
      }
#pragma GCC unroll 8
      for (int g = 0; g < kG; ++g) S::prefetch(line + ahead + g * next_dims);
    }
    if (t < stop) one_token.template operator()<0>(line, t++);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) S::store(out + r * dim + j * S::kWidth, sums[r][j]);
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
