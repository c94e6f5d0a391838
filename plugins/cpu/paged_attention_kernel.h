// Causal attention over the paged KV cache: an online softmax whose tiles are the KV blocks, anchored to positions.
//
//   rows of one sequence and KV head: row = token * group + query head, so that visible lengths ascend
//
//   position   0        512       1024          a split is a fixed run of blocks with its own max, sum and output;
//              ├ split 0 ┼ split 1 ┼ ...        splits are merged in order, whoever computed them
//   tile       |b0|b1|..|                       scores [rows][block] = q . K, then output += p . V
//
// Every row runs through the same operations in the same order whatever rows share its registers, its item, its step
// or its thread: lanes beyond a row's position, or before its window, are selected away, never multiplied, so slots
// there may hold anything. Tiles before the windows of all rows of an item are skipped.
// Prefill reuses a tile of K and V for kItemRows rows (bound by FMA), decode reads each K and V once per KV head
// (bound by memory: 2 * head_dim * itemsize bytes per token and KV head, and 8 of scales in an int8 cache).
// int8 codes are multiplied as floats. Their scales never touch a code: a key's scale multiplies the finished sum over
// the dims, before the soft cap; a value's scale multiplies the weight, after the weight went into the sum of weights.
#pragma once

#include <initializer_list>
#include <limits>

#include "ingot/kernel.h"
#include "kv_head.h"
#include "simd_lanes.h"
#include "simd_math.h"

namespace ingot {
namespace {

constexpr int64_t kItemRows = 48;          // rows that share a pass over the cache
constexpr int64_t kSplitTokens = 512;      // rounded down to whole blocks
constexpr int64_t kMaxPartialRows = 4096;  // rows x splits that threads may leave in shared scratch
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Calls f.template operator()<n>() for the n in 1 .. kMost that is asked for.
template <int kMost, typename F>
[[gnu::always_inline]] inline void with_count(int64_t n, F f) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, f);
  }
  f.template operator()<kMost>();
}

// What rows have gathered so far: maximum of scores, sum of weights, weighted sum of values [padded_dim].
struct RowState {
  float* top;
  float* sum;
  float* out;
};

struct AttentionItem {
  int64_t sequence, head;  // KV head
  int64_t begin, end;      // rows
};

template <typename S, typename T>
class PagedAttention {
 public:
  using V = typename S::V;
  // Rows in registers: kRows x 2 sums, 2 loads, 1 broadcast.
  static constexpr int kRows = S::kRegisters >= 32 ? 8 : S::kRegisters >= 16 ? 6 : 2;

  explicit PagedAttention(const PagedAttentionArgs& args)
      : args_(args),
        kv_(args.kv),
        group_(args.heads / args.kv.kv_heads),
        split_(kSplitTokens / args.kv.block_size * args.kv.block_size) {}

  void run(const Team& team);

  static size_t shared_bytes(const PagedKv& kv) {
    return static_cast<size_t>(kMaxPartialRows * (kv.padded_dim + 2)) * sizeof(float);
  }

 private:
  int64_t rows_of(int64_t s) const { return (kv_.query_starts[s + 1] - kv_.query_starts[s]) * group_; }
  int64_t items_of(int64_t s) const { return (rows_of(s) + kItemRows - 1) / kItemRows; }
  int64_t visible(int64_t s, int64_t row) const { return kv_.past_lengths[s] + row / group_ + 1; }
  int64_t hidden(int64_t s, int64_t row) const {  // tokens before the window
    const int64_t n = visible(s, row) - args_.window;
    return n < 0 ? 0 : n;
  }
  int64_t splits(int64_t visible_tokens) const { return (visible_tokens + split_ - 1) / split_; }
  int64_t splits_of(int64_t s) const { return splits(visible(s, rows_of(s) - 1)); }
  const float* query(const AttentionItem& item, int64_t row) const { return args_.q + token_head(item, row) * kv_.head_dim; }
  int64_t token_head(const AttentionItem& item, int64_t row) const {
    return (kv_.query_starts[item.sequence] + row / group_) * args_.heads + item.head * group_ + row % group_;
  }

  bool worth_splitting(const Team& team) const;
  void run_whole(const Team& team);
  void run_split(const Team& team);
  void load_queries(const AttentionItem& item);
  void attend(const AttentionItem& item, int64_t split, const RowState& state);
  void attend_tile(const AttentionItem& item, int64_t first, int64_t tile, int64_t next_tile, const RowState& state);
  int64_t block_at(const AttentionItem& item, int64_t tile) const {
    return kv_.block_tables[item.sequence * kv_.table_width + tile / kv_.block_size];
  }
  void softmax(float* p, int64_t begin, int64_t end, const float* value_scales, const RowState& state, int64_t row);
  void merge(const RowState& into, int64_t row, const RowState& from, int64_t from_row);
  void finish(const AttentionItem& item, int64_t row, const RowState& state, int64_t state_row);
  template <int kN>  // vectors
  static void prefetch_lines(const T* p) {
    for (size_t i = 0; i < kN * S::kWidth; i += 64 / sizeof(T)) S::prefetch(p + i);
  }
  template <int kR>
  void score(const float* q, T* keys, int64_t n, int64_t ahead, float* p) const;
  template <int kR>
  void weigh(const float* p, const T* values, int64_t begin, int64_t end, int64_t ahead, float* out) const;
  void allocate(const Team& team);

  const PagedAttentionArgs& args_;
  const PagedKv& kv_;
  const int64_t group_, split_;
  float* q_ = nullptr;  // [kItemRows][head_dim], scaled
  float* p_ = nullptr;  // [kRows][block_size]
  RowState first_{}, later_{};  // [kItemRows]: the first split and what is merged into it; the split in work
};

template <typename S, typename T>
void PagedAttention<S, T>::allocate(const Team& team) {
  const int64_t state = kItemRows * (kv_.padded_dim + 2);
  const int64_t floats = kItemRows * kv_.head_dim + kRows * kv_.block_size + 2 * state;
  float* next = reinterpret_cast<float*>(team.scratch(static_cast<size_t>(floats) * sizeof(float)));
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  for (RowState* each : {&first_, &later_}) each->out = take(kItemRows * kv_.padded_dim);
  q_ = take(kItemRows * kv_.head_dim);
  p_ = take(kRows * kv_.block_size);
  for (RowState* each : {&first_, &later_}) {
    each->top = take(kItemRows);
    each->sum = take(kItemRows);
  }
}

template <typename S, typename T>
void PagedAttention<S, T>::run(const Team& team) {
  allocate(team);
  worth_splitting(team) ? run_split(team) : run_whole(team);
}

// Few items and long contexts: threads share the splits of an item. The arithmetic is the same.
template <typename S, typename T>
bool PagedAttention<S, T>::worth_splitting(const Team& team) const {
  int64_t items = 0, partial_rows = 0, most_splits = 0;
  for (int64_t s = 0; s < kv_.sequences; ++s) {
    items += items_of(s) * kv_.kv_heads;
    partial_rows += rows_of(s) * kv_.kv_heads * splits_of(s);
    most_splits = splits_of(s) > most_splits ? splits_of(s) : most_splits;
  }
  return team.count > 1 && items < 4 * team.count && most_splits > 1 && partial_rows <= kMaxPartialRows;
}

// Items in reverse, because the last rows of a long prompt see most and should not be left for the end.
template <typename S, typename T>
void PagedAttention<S, T>::run_whole(const Team& team) {
  int64_t s = kv_.sequences - 1, before = 0;  // items of the sequences after s
  for (int64_t turn = team.take();; turn = team.take()) {
    while (s >= 0 && turn - before >= items_of(s) * kv_.kv_heads) before += items_of(s--) * kv_.kv_heads;
    if (s < 0) return;
    const int64_t local = turn - before, begin = (items_of(s) - 1 - local / kv_.kv_heads) * kItemRows;
    const AttentionItem item{s, local % kv_.kv_heads, begin, begin + kItemRows < rows_of(s) ? begin + kItemRows : rows_of(s)};
    const int64_t last_split = splits(visible(s, item.end - 1)) - 1;
    const int64_t first_split = hidden(s, item.begin) / split_;
    load_queries(item);
    attend(item, first_split, first_);
    for (int64_t split = first_split + 1; split <= last_split; ++split) {
      attend(item, split, later_);
      for (int64_t row = item.begin; row < item.end; ++row)
        if (split < splits(visible(s, row))) merge(first_, row - item.begin, later_, row - item.begin);
    }
    for (int64_t row = item.begin; row < item.end; ++row) finish(item, row, first_, row - item.begin);
  }
}

// Two rounds: (item, split) into shared scratch [sequence][KV head][split][row], then the merge, item by item.
template <typename S, typename T>
void PagedAttention<S, T>::run_split(const Team& team) {
  float* tops = reinterpret_cast<float*>(team.shared);
  const RowState partial{tops, tops + kMaxPartialRows, tops + 2 * kMaxPartialRows};
  for (const bool merging : {false, true}) {
    if (merging) team.barrier();
    int64_t turn = team.take(), unit = 0, base = 0;
    for (int64_t s = 0; s < kv_.sequences; ++s) {
      const int64_t rows = rows_of(s), count = splits_of(s);
      for (int64_t head = 0; head < kv_.kv_heads; ++head, base += rows * count) {
        for (int64_t begin = 0; begin < rows; begin += kItemRows) {
          const AttentionItem item{s, head, begin, begin + kItemRows < rows ? begin + kItemRows : rows};
          for (int64_t split = 0; split < (merging ? 1 : count); ++split, ++unit) {
            if (unit != turn) continue;
            turn = team.take();
            const int64_t at = base + split * rows + begin;
            const RowState mine{partial.top + at, partial.sum + at, partial.out + at * kv_.padded_dim};
            if (!merging) {
              load_queries(item);
              attend(item, split, mine);
              continue;
            }
            for (int64_t row = begin; row < item.end; ++row) {
              for (int64_t next = 1; next < splits(visible(s, row)); ++next) merge(mine, row - begin, mine, next * rows + row - begin);
              finish(item, row, mine, row - begin);
            }
          }
        }
      }
    }
  }
}

template <typename S, typename T>
void PagedAttention<S, T>::load_queries(const AttentionItem& item) {
  for (int64_t row = item.begin; row < item.end; ++row) {
    const float* q = query(item, row);
    float* scaled = q_ + (row - item.begin) * kv_.head_dim;
    for (int64_t i = 0; i < kv_.head_dim; i += S::kWidth) {
      const int64_t n = kv_.head_dim - i;
      store_lanes<S>(scaled + i, S::mul(load_lanes<S>(q + i, n), S::set1(args_.scale)), n);
    }
  }
}

// Fills state [item rows] with one split. Rows that see nothing of it keep the empty state.
template <typename S, typename T>
void PagedAttention<S, T>::attend(const AttentionItem& item, int64_t split, const RowState& state) {
  const int64_t rows = item.end - item.begin;
  for (int64_t row = 0; row < rows; ++row) {
    state.top[row] = kLowest;
    state.sum[row] = 0.0f;
    for (int64_t i = 0; i < kv_.padded_dim; ++i) state.out[row * kv_.padded_dim + i] = 0.0f;
  }
  const int64_t longest = visible(item.sequence, item.end - 1);
  const int64_t end = (split + 1) * split_ < longest ? (split + 1) * split_ : longest;
  const int64_t unseen = hidden(item.sequence, item.begin) / kv_.block_size * kv_.block_size;
  for (int64_t tile = split * split_ < unseen ? unseen : split * split_; tile < end; tile += kv_.block_size) {
    const int64_t next = tile + kv_.block_size < end ? tile + kv_.block_size : tile;
    for (int64_t first = 0; first < rows; first += kRows) attend_tile(item, first, tile, first == 0 ? next : tile, state);
  }
}

// One tile for up to kRows rows of the item, which meanwhile fetches the next one from memory.
template <typename S, typename T>
void PagedAttention<S, T>::attend_tile(const AttentionItem& item, int64_t first, int64_t tile, int64_t next_tile,
                                       const RowState& state) {
  const int64_t size = kv_.block_size, left = item.end - item.begin - first, rows = left < kRows ? left : kRows;
  const auto inside = [&](int64_t n) { return n < 0 ? 0 : n < size ? n : size; };
  // tokens of the tile that a row sees: [begin(row), end(row)), both ascend with the row
  const auto begin = [&](int64_t row) { return inside(hidden(item.sequence, item.begin + first + row) - tile); };
  const auto end = [&](int64_t row) { return inside(visible(item.sequence, item.begin + first + row) - tile); };
  const int64_t most = end(rows - 1), shared_begin = begin(rows - 1), shared_end = end(0);
  if (most == 0 || begin(0) == size) return;
  const int64_t block = block_at(item, tile), place = block * kv_.block_bytes;
  const int64_t ahead = (block_at(item, next_tile) - block) * kv_.block_bytes / int64_t{sizeof(T)};  // to the next tile's
  const int64_t key_size = kv_head_size<T>(kv_.head_dim, size), value_size = kv_head_size<T>(kv_.padded_dim, size);
  T* keys = reinterpret_cast<T*>(kv_.keys + place) + item.head * key_size;
  T* values = reinterpret_cast<T*>(kv_.values + place) + item.head * value_size;
  const float* value_scales = kv_scales(values, kv_.padded_dim, size);
  if constexpr (kScaled<T>) {  // the loops over codes fetch the next tile's codes
    for (int64_t i = 0; ahead != 0 && i < size; i += 64 / int64_t{sizeof(float)}) {
      S::prefetch(kv_scales(keys + ahead, kv_.head_dim, size) + i);
      S::prefetch(kv_scales(values + ahead, kv_.padded_dim, size) + i);
    }
  }
  float* out = state.out + first * kv_.padded_dim;
  with_count<kRows>(rows, [&]<int kR>() { score<kR>(q_ + first * kv_.head_dim, keys, most, ahead, p_); });
  for (int64_t row = 0; row < rows; ++row)
    if (begin(row) < end(row)) softmax(p_ + row * size, begin(row), end(row), value_scales, state, first + row);
  const auto weigh_alone = [&](int64_t row, int64_t from, int64_t to) {
    if (from < to) weigh<1>(p_ + row * size, values, from, to, 0, out + row * kv_.padded_dim);
  };
  if (shared_begin >= shared_end) {
    for (int64_t row = 0; row < rows; ++row) weigh_alone(row, begin(row), end(row));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) weigh_alone(row, begin(row), shared_begin);
  with_count<kRows>(rows, [&]<int kR>() { weigh<kR>(p_, values, shared_begin, shared_end, ahead, out); });
  for (int64_t row = 0; row < rows; ++row) weigh_alone(row, shared_end, end(row));
}

// p[row][token] = q[row] . K[:, token] for the first n tokens, rounded up to whole vectors; dims ascend. Where keys are
// codes, times their scale.
template <typename S, typename T>
template <int kR>
void PagedAttention<S, T>::score(const float* q, T* keys, int64_t n, int64_t ahead, float* p) const {
  const int64_t size = kv_.block_size, dim = kv_.head_dim;
  const float* scales = kv_scales(keys, dim, size);
  const auto columns = [&]<int kN>(int64_t token) {
    V sums[kR][kN];
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) sums[r][j] = S::zero();
    const T* column = keys + token;
    for (int64_t d = 0; d < dim; ++d, column += size) {
      V k[kN];
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) k[j] = load_full<S>(column + j * S::kWidth);
      prefetch_lines<kN>(column + ahead);
#pragma GCC unroll 8
      for (int r = 0; r < kR; ++r) {
        const V each = S::set1(q[r * dim + d]);
#pragma GCC unroll 8
        for (int j = 0; j < kN; ++j) sums[r][j] = S::fma(each, k[j], sums[r][j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) {
        if constexpr (kScaled<T>) sums[r][j] = S::mul(sums[r][j], S::load(scales + token + j * S::kWidth));
        S::store(p + r * size + token + j * S::kWidth, sums[r][j]);
      }
  };
  constexpr int kWide = kR <= 2 ? 4 : 2;
  int64_t token = 0;
  for (; token < n && token + kWide * S::kWidth <= size; token += kWide * S::kWidth) columns.template operator()<kWide>(token);
  for (; token < n; token += S::kWidth) columns.template operator()<1>(token);
}

// p of the tokens begin .. end-1 becomes exp(p - top); top, sum and the output so far follow a new maximum. Where values
// are codes, p is then multiplied by their scale.
template <typename S, typename T>
void PagedAttention<S, T>::softmax(float* p, int64_t begin, int64_t end, const float* value_scales, const RowState& state,
                                   int64_t row) {
  const auto first_lanes = [](int64_t n) { return S::first_lanes(n < 0 ? 0 : n < S::kWidth ? n : S::kWidth); };
  const auto kept = [&](int64_t i, V v, V otherwise) {  // v where the lane is a token that the row sees
    return S::select(first_lanes(begin - i), otherwise, S::select(first_lanes(end - i), v, otherwise));
  };
  const int64_t start = begin / S::kWidth * S::kWidth;
  V tops = S::set1(kLowest);
  for (int64_t i = start; i < end; i += S::kWidth) {
    V scores = S::load(p + i);
    if (args_.softcap > 0) {
      scores = bend<S>(scores, args_.softcap);
      S::store(p + i, scores);
    }
    tops = S::max(tops, kept(i, scores, S::set1(kLowest)));
  }
  const float tile_top = S::reduce_max(tops), old = state.top[row];
  const float top = tile_top > old ? tile_top : old;
  V sums = S::zero();
  for (int64_t i = start; i < end; i += S::kWidth) {
    const V weights = kept(i, exp<S>(S::sub(S::load(p + i), S::set1(top))), S::zero());
    sums = S::add(sums, weights);
    if constexpr (kScaled<T>)
      S::store(p + i, S::mul(weights, S::load(value_scales + i)));  // lanes that the row does not see are never read
    else
      S::store(p + i, weights);
  }
  if (top != old) {
    const V factor = exp<S>(S::set1(old - top));
    S::store_partial(state.sum + row, S::mul(S::set1(state.sum[row]), factor), 1);
    float* out = state.out + row * kv_.padded_dim;
    for (int64_t i = 0; i < kv_.padded_dim; i += S::kWidth) S::store(out + i, S::mul(S::load(out + i), factor));
  }
  state.top[row] = top;
  state.sum[row] += S::reduce_add(sums);
}

// out[row] += p[row][token] * V[token] for tokens begin .. end-1, ascending.
template <typename S, typename T>
template <int kR>
void PagedAttention<S, T>::weigh(const float* p, const T* values, int64_t begin, int64_t end, int64_t ahead,
                                 float* out) const {
  const int64_t size = kv_.block_size, dim = kv_.padded_dim;
  const auto columns = [&]<int kN>(int64_t at) {
    V sums[kR][kN];
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) sums[r][j] = S::load(out + r * dim + at + j * S::kWidth);
    const T* value = values + begin * dim + at;
    for (int64_t t = begin; t < end; ++t, value += dim) {
      V v[kN];
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) v[j] = load_full<S>(value + j * S::kWidth);
      prefetch_lines<kN>(value + ahead);
#pragma GCC unroll 8
      for (int r = 0; r < kR; ++r) {
        const V each = S::set1(p[r * size + t]);
#pragma GCC unroll 8
        for (int j = 0; j < kN; ++j) sums[r][j] = S::fma(each, v[j], sums[r][j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) S::store(out + r * dim + at + j * S::kWidth, sums[r][j]);
  };
  constexpr int kWide = kR == 1 ? 8 : kR == 2 ? 4 : 2;
  int64_t at = 0;
  for (; at + kWide * S::kWidth <= dim; at += kWide * S::kWidth) columns.template operator()<kWide>(at);
  for (; at < dim; at += S::kWidth) columns.template operator()<1>(at);
}

// Joins a later split to an earlier one.
template <typename S, typename T>
void PagedAttention<S, T>::merge(const RowState& into, int64_t row, const RowState& from, int64_t from_row) {
  if (from.sum[from_row] == 0.0f) return;  // the row's window begins later
  const float old = into.top[row], other = from.top[from_row], top = other > old ? other : old;
  const V keep = exp<S>(S::set1(old - top)), add = exp<S>(S::set1(other - top));
  const V sum = S::fma(S::set1(from.sum[from_row]), add, S::mul(S::set1(into.sum[row]), keep));
  float* out = into.out + row * kv_.padded_dim;
  const float* more = from.out + from_row * kv_.padded_dim;
  for (int64_t i = 0; i < kv_.padded_dim; i += S::kWidth)
    S::store(out + i, S::fma(S::load(more + i), add, S::mul(S::load(out + i), keep)));
  into.top[row] = top;
  S::store_partial(into.sum + row, sum, 1);
}

template <typename S, typename T>
void PagedAttention<S, T>::finish(const AttentionItem& item, int64_t row, const RowState& state, int64_t state_row) {
  float* y = args_.y + token_head(item, row) * kv_.head_dim;
  const float* out = state.out + state_row * kv_.padded_dim;
  for (int64_t i = 0; i < kv_.head_dim; i += S::kWidth)
    store_lanes<S>(y + i, S::div(S::load(out + i), S::set1(state.sum[state_row])), kv_.head_dim - i);
}

template <typename S, typename T>
void paged_attention(const PagedAttentionArgs& args, const Team& team) {
  PagedAttention<S, T>(args).run(team);
}

template <typename S, typename T>
size_t paged_attention_scratch(const void* args) {
  return PagedAttention<S, T>::shared_bytes(static_cast<const PagedAttentionArgs*>(args)->kv);
}

}  // namespace
}  // namespace ingot
