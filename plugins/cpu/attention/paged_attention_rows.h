// What all attention kernels share: rows of queries, how they are cut into items and splits, how threads take them, and
// what is gathered per row.
//
//   rows of one sequence and KV head: row = token * group + query head, so that visible lengths ascend
//
//   position   0        512       1024          a split is a fixed run of tokens with its own max, sum and output;
//              ├ split 0 ┼ split 1 ┼ ...        splits are merged in order, whichever thread computed them
//
// `Inner` computes one split for the rows of an item:
//   kItemRows                        rows that share a pass over the cache, at most
//   kLeastItemRows                   so many at most while threads would have few items, if that is fewer
//   Inner(rows), floats(kv)          floats of scratch that a thread needs, given by
//   allocate(memory)
//   load_queries(item, rotated)       rotated: room for the queries of a token
//   attend(item, begin, end, state)  fills state [item rows] from the tokens begin .. end-1; a row that sees none of
//   them
//                                    keeps top = -infinity and sum = 0, and its out is 0
//   kSetsOut                         whether it sets all of state.out where there are tokens, or adds to the zeros
//   there
//   kDividesOnce                     whether rows are multiplied by 1 / sum, not divided by it
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "attention/paged_attention_args.h"
#include "attention/paged_attention_softmax.h"
#include "ingot/kernel.h"
#include "isa/simd_lanes.h"

namespace ingot {
namespace {

constexpr int64_t kSplitTokens = 512;
constexpr int64_t kMaxPartialRows = 4096;  // rows x splits that threads may leave in shared scratch

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

// Where rows are and what they see.
struct AttentionRows {
  const PagedAttentionArgs& args;
  const PagedKv& kv;
  const int64_t group;  // query heads of a KV head

  explicit AttentionRows(const PagedAttentionArgs& a) : args(a), kv(a.kv), group(a.heads / a.kv.kv_heads) {
    if (a.rope == nullptr) return;
    rotation_ = a.rope->args;
    rotation_.k_norm = nullptr;
    rotation_.kv.kv_heads = 0;
    rotation_.kv.tokens = 1;
  }

  int64_t count(int64_t s) const { return (kv.query_starts[s + 1] - kv.query_starts[s]) * group; }
  int64_t visible(int64_t s, int64_t row) const { return kv.past_lengths[s] + row / group + 1; }
  int64_t hidden(int64_t s, int64_t row) const {  // tokens before the window
    const int64_t n = visible(s, row) - args.window;
    return n < 0 ? 0 : n;
  }
  int64_t splits(int64_t s, int64_t row) const { return (visible(s, row) + kSplitTokens - 1) / kSplitTokens; }
  int64_t splits(int64_t s) const { return splits(s, count(s) - 1); }
  // Rows begin .. end-1 of an item that are a token's, what they see, their queries, and where these come from.
  struct TokenRows {
    int64_t begin, end, hidden, visible;
    const float *queries, *source;
  };
  // Calls f for each token of an item. rotated [rows of a token * head_dim] takes queries that are rotated here.
  template <typename F>
  void tokens(const AttentionItem& item, float* rotated, F f) const {
    const int64_t first = item.begin / group, past = kv.past_lengths[item.sequence],
                  start = kv.query_starts[item.sequence];
    const float* const q = source(item, item.begin);
    TokenRows rows{item.begin, 0, 0, 0, nullptr, nullptr};
    for (int64_t token = first; rows.begin < item.end; ++token, rows.begin = rows.end) {
      rows.end = std::min((token + 1) * group, item.end);
      rows.visible = past + token + 1;
      rows.hidden = std::max<int64_t>(rows.visible - args.window, 0);
      // those of the first token may begin with another one than its first
      rows.source =
          q + (token - first) * source_stride() - (token > first ? (item.begin - first * group) * kv.head_dim : 0);
      rows.queries = rows.source;
      if (args.rope != nullptr) {
        rotate_queries(start + token, rows.source, rows.end - rows.begin, rotated);
        rows.queries = rotated;
      }
      f(rows);
    }
  }
  // From a query to that of the next token.
  int64_t source_stride() const { return args.rope != nullptr ? args.rope->args.width() : args.heads * kv.head_dim; }
  // Where the query of a row comes from, rotated or not.
  const float* source(const AttentionItem& item, int64_t row) const {
    if (args.rope == nullptr) return args.q + place(item, row) * kv.head_dim;
    return args.rope->args.qkv + token(item, row) * source_stride() + (item.head * group + row % group) * kv.head_dim;
  }
  // Calls f(numbers, count) for the queries of each token of an item where they come from.
  template <typename F>
  void sources(const AttentionItem& item, F f) const {
    for (int64_t row = item.begin, next = 0; row < item.end; row = next) {
      next = (row / group + 1) * group < item.end ? (row / group + 1) * group : item.end;
      f(source(item, row), (next - row) * kv.head_dim);
    }
  }
  float* output(const AttentionItem& item, int64_t row) const { return args.y + place(item, row) * kv.value_dim; }
  // Factor of the queries of a token that sees so many.
  float scale(int64_t visible) const {
    if (args.growth == 0) return args.scale;
    const double count = static_cast<double>(1 + (visible - 1) / args.growth_every);
    return static_cast<float>(args.scale * (1 + args.growth * std::log(count)));
  }
  // The slope of a row of an item.
  float slope(const AttentionItem& item, int64_t row) const {
    return args.slopes == nullptr ? 0.0f : args.slopes[item.head * group + row % group];
  }
  // Whether scores are not yet what the softmax takes.
  bool changes_scores() const { return args.softcap > 0 || args.slopes != nullptr; }
  // Scores of the tokens from `token` on, capped and with what the slope adds, for a row that sees `visible` tokens.
  template <typename S>
  typename S::V changed(typename S::V scores, float slope, int64_t token, int64_t visible) const {
    using V = typename S::V;
    if (args.softcap > 0) scores = bend<S>(scores, args.softcap);
    if (args.slopes == nullptr) return scores;
    const V lanes = S::load(kLanes);
    if (!args.bf16_bias)
      return S::fma(S::set1(slope), S::add(S::set1(static_cast<float>(token - visible + 1)), lanes), scores);
    const auto rounded = [](V v) {
      alignas(64) uint16_t numbers[S::kWidth];
      S::store_bf16(numbers, v);
      return S::load_bf16(numbers);
    };
    const V tokens = rounded(S::add(S::set1(static_cast<float>(token)), lanes));
    return S::fma(rounded(S::mul(S::set1(slope), tokens)), S::set1(args.scale), scores);
  }
  const int32_t* blocks(int64_t s) const { return kv.block_tables + s * kv.table_width; }
  int64_t block(int64_t s, int64_t position) const { return blocks(s)[position / kv.block_size]; }

 private:
  alignas(64) static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  int64_t token(const AttentionItem& item, int64_t row) const { return kv.query_starts[item.sequence] + row / group; }
  int64_t place(const AttentionItem& item, int64_t row) const {
    return token(item, row) * args.heads + item.head * group + row % group;
  }
  // `count` queries of a token → to [count * head_dim].
  void rotate_queries(int64_t token, const float* queries, int64_t count, float* to) const {
    const RopeKvWriteArgs& all = args.rope->args;
    rotation_.qkv = queries;
    if (all.cos_sin != nullptr) rotation_.cos_sin = all.cos_sin + token * 2 * all.half;
    rotation_.q = to;
    rotation_.heads = count;
    args.rope->run(&rotation_, Team{});
  }

  mutable RopeKvWriteArgs rotation_{};  // of one token; a copy for each would wait until all stores before it are done
};

template <typename S, typename Inner>
class PagedAttention {
 public:
  explicit PagedAttention(const PagedAttentionArgs& args) : rows_(args), kv_(args.kv), inner_(rows_) {}

  void run(const Team& team) {
    allocate(team);
    if constexpr (requires { Inner::kLeastItemRows; })
      if (all_items() < kManyItems * team.count) item_rows_ = Inner::kLeastItemRows;
    worth_splitting(team) ? run_split(team) : run_whole(team);
  }

  static size_t shared_bytes(const PagedKv& kv) {
    return static_cast<size_t>(kMaxPartialRows * (kv.padded_dim + 2)) * sizeof(float);
  }

 private:
  static constexpr int64_t kItemRows = Inner::kItemRows;
  static constexpr int64_t kManyItems = 16;  // of a thread

  int64_t items_of(int64_t s) const { return (rows_.count(s) + item_rows_ - 1) / item_rows_; }
  int64_t all_items() const {
    int64_t items = 0;
    for (int64_t s = 0; s < kv_.sequences; ++s) items += items_of(s) * kv_.kv_heads;
    return items;
  }
  AttentionItem item_at(int64_t s, int64_t head, int64_t begin) const {
    const int64_t count = rows_.count(s);
    return {s, head, begin, begin + item_rows_ < count ? begin + item_rows_ : count};
  }

  int64_t first_split_of(const AttentionItem& item) const {
    return rows_.hidden(item.sequence, item.begin) / kSplitTokens;
  }
  // Tokens begin .. end-1 of a split that some row of the item sees.
  struct Tokens {
    int64_t begin, end;
  };
  Tokens tokens_of(const AttentionItem& item, int64_t split) const {
    const int64_t begin = split * kSplitTokens, end = begin + kSplitTokens;
    const int64_t unseen = rows_.hidden(item.sequence, item.begin),
                  longest = rows_.visible(item.sequence, item.end - 1);
    return {begin < unseen ? unseen : begin, end < longest ? end : longest};
  }

  void allocate(const Team& team);
  bool worth_splitting(const Team& team) const;
  void run_whole(const Team& team);
  void run_split(const Team& team);
  bool find(int64_t number, int64_t& s, int64_t& before, AttentionItem& item) const;
  // A split of an item, and its first row in shared scratch.
  struct Part {
    AttentionItem item;
    int64_t split, at;
  };
  // A sequence, the items before its own, and its first row in shared scratch.
  struct Place {
    int64_t s, before, base;
  };
  bool find_part(int64_t number, bool merging, Place& at, Part& part) const;
  void attend(const AttentionItem& item, int64_t split, const RowState& state);
  void expect(const AttentionItem& item, int64_t split);
  void merge(const RowState& into, int64_t row, const RowState& from, int64_t from_row) const;
  void finish(const AttentionItem& item, int64_t row, const RowState& state, int64_t state_row) const;

  const AttentionRows rows_;
  const PagedKv& kv_;
  Inner inner_;
  int64_t item_rows_ = kItemRows;
  RowState first_{}, later_{};  // [kItemRows]: the first split and what is merged into it; the split in work
  float* rotated_ = nullptr;    // [kItemRows][head_dim], of which the rows of a token are used
};

template <typename S, typename Inner>
void PagedAttention<S, Inner>::allocate(const Team& team) {
  const int64_t state =
      kItemRows * (kv_.padded_dim + 2);  // padded_dim, kItemRows: multiples of 16, so all stays aligned
  const int64_t rotated = rows_.args.rope == nullptr ? 0 : kItemRows * kv_.padded_dim;
  float* next = reinterpret_cast<float*>(
      team.scratch(static_cast<size_t>(2 * state + rotated + Inner::floats(kv_)) * sizeof(float)));
  for (RowState* each : {&first_, &later_}) {
    *each = {next, next + kItemRows, next + 2 * kItemRows};
    next += state;
  }
  rotated_ = next;
  inner_.allocate(next + rotated);
}

// Few items and long contexts: threads share the splits of an item. The arithmetic is the same.
template <typename S, typename Inner>
bool PagedAttention<S, Inner>::worth_splitting(const Team& team) const {
  int64_t partial_rows = 0, most_splits = 0;
  for (int64_t s = 0; s < kv_.sequences; ++s) {
    const int64_t splits = rows_.splits(s);
    partial_rows += rows_.count(s) * kv_.kv_heads * splits;
    most_splits = splits > most_splits ? splits : most_splits;
  }
  return team.count > 1 && all_items() < 4 * team.count && most_splits > 1 && partial_rows <= kMaxPartialRows;
}

// The item of a number; `s`, whose first one is `before`, goes on to its sequence. False where no item is left.
// Items in reverse, because the last rows of a long prompt see most and should not be left for the end.
template <typename S, typename Inner>
bool PagedAttention<S, Inner>::find(int64_t number, int64_t& s, int64_t& before, AttentionItem& item) const {
  for (; s >= 0; before += items_of(s--) * kv_.kv_heads) {
    const int64_t local = number - before;
    if (local >= items_of(s) * kv_.kv_heads) continue;
    item = item_at(s, local % kv_.kv_heads, (items_of(s) - 1 - local / kv_.kv_heads) * item_rows_);
    return true;
  }
  return false;
}

template <typename S, typename Inner>
void PagedAttention<S, Inner>::run_whole(const Team& team) {
  AttentionItem item{}, next{};
  const int64_t items = all_items();
  int64_t s = kv_.sequences - 1, before = 0;
  for (int64_t number = team.next_of_shares(items); number < items; number = team.next_of_shares(items)) {
    if (number < before) s = kv_.sequences - 1, before = 0;  // of another thread's share
    find(number, s, before, item);
    const int64_t first_split = first_split_of(item);
    inner_.load_queries(item, rotated_);
    const int64_t splits = rows_.splits(s, item.end - 1);
    for (int64_t split = first_split; split < splits; ++split) {
      int64_t next_s = s, next_before = before;
      if (split + 1 < splits) expect(item, split + 1);
      if (split + 2 >= splits && find(number + 1, next_s, next_before, next))
        expect(next, first_split_of(next));  // likely its next one
      attend(item, split, split == first_split ? first_ : later_);
      for (int64_t row = item.begin; split > first_split && row < item.end; ++row)
        if (split < rows_.splits(s, row)) merge(first_, row - item.begin, later_, row - item.begin);
    }
    for (int64_t row = item.begin; row < item.end; ++row) finish(item, row, first_, row - item.begin);
  }
}

// The part of a number, or the item to merge, its split 0; `at` goes on to its sequence. False where no part is left.
template <typename S, typename Inner>
bool PagedAttention<S, Inner>::find_part(int64_t number, bool merging, Place& at, Part& part) const {
  for (; at.s < kv_.sequences; ++at.s) {
    const int64_t count = rows_.count(at.s), splits = rows_.splits(at.s), parts = merging ? 1 : splits;
    const int64_t local = number - at.before, items = items_of(at.s);
    if (local < items * kv_.kv_heads * parts) {
      const int64_t head = local / parts / items, begin = local / parts % items * item_rows_, split = local % parts;
      part = {item_at(at.s, head, begin), split, at.base + (head * splits + split) * count + begin};
      return true;
    }
    at.before += items * kv_.kv_heads * parts;
    at.base += count * kv_.kv_heads * splits;
  }
  return false;
}

// Two rounds: (item, split) into shared scratch [sequence][KV head][split][row], then the merge, item by item.
template <typename S, typename Inner>
void PagedAttention<S, Inner>::run_split(const Team& team) {
  float* tops = reinterpret_cast<float*>(team.shared);
  const auto state = [&](int64_t at) {
    return RowState{tops + at, tops + kMaxPartialRows + at, tops + 2 * kMaxPartialRows + at * kv_.padded_dim};
  };
  Part part{}, next{};
  Place place{};
  const int64_t items = all_items();
  int64_t parts = 0;
  for (int64_t s = 0; s < kv_.sequences; ++s) parts += items_of(s) * kv_.kv_heads * rows_.splits(s);
  for (int64_t number = team.next_of_shares(parts); number < parts; number = team.next_of_shares(parts)) {
    if (number < place.before) place = {};  // of another thread's share
    find_part(number, false, place, part);
    inner_.load_queries(part.item, rotated_);
    Place later = place;
    for (int64_t ahead = 1; ahead <= 2; ++ahead)  // likely this thread's next ones
      if (find_part(number + ahead, false, later, next)) expect(next.item, next.split);
    attend(part.item, part.split, state(part.at));
  }
  team.barrier();
  place = {};
  for (int64_t number = team.next_of_shares(items); number < items; number = team.next_of_shares(items)) {
    if (number < place.before) place = {};
    find_part(number, true, place, part);
    const AttentionItem& item = part.item;
    const RowState mine = state(part.at);
    for (int64_t row = 0; row < item.end - item.begin; ++row) {
      for (int64_t split = 1; split < rows_.splits(item.sequence, item.begin + row); ++split)
        merge(mine, row, mine, split * rows_.count(item.sequence) + row);
      finish(item, item.begin + row, mine, row);
    }
  }
}

template <typename S, typename Inner>
void PagedAttention<S, Inner>::attend(const AttentionItem& item, int64_t split, const RowState& state) {
  const int64_t rows = item.end - item.begin;
  const Tokens tokens = tokens_of(item, split);
  std::fill_n(state.top, rows, kLowest);
  std::fill_n(state.sum, rows, 0.0f);
  if (!Inner::kSetsOut || tokens.begin >= tokens.end) std::fill_n(state.out, rows * kv_.padded_dim, 0.0f);
  inner_.attend(item, tokens.begin, tokens.end, state);
}

// Says what is likely to be attended after the next call of `attend`.
template <typename S, typename Inner>
void PagedAttention<S, Inner>::expect(const AttentionItem& item, int64_t split) {
  const Tokens tokens = tokens_of(item, split);
  if constexpr (requires { inner_.expect(item, tokens.begin, tokens.end); })
    inner_.expect(item, tokens.begin, tokens.end);
}

// Joins a later split to an earlier one.
template <typename S, typename Inner>
void PagedAttention<S, Inner>::merge(const RowState& into, int64_t row, const RowState& from, int64_t from_row) const {
  using V = typename S::V;
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

template <typename S, typename Inner>
void PagedAttention<S, Inner>::finish(const AttentionItem& item, int64_t row, const RowState& state,
                                      int64_t state_row) const {
  using V = typename S::V;
  float* y = rows_.output(item, row);
  const float* out = state.out + state_row * kv_.padded_dim;
  V sum = S::set1(state.sum[state_row]), keep = S::set1(1.0f);
  if (rows_.args.sinks != nullptr) {  // one more score, whose value is zero
    const float sink = rows_.args.sinks[item.head * rows_.group + row % rows_.group], old = state.top[state_row];
    const V top = S::set1(sink > old ? sink : old);
    keep = exp<S>(S::sub(S::set1(old), top));
    sum = S::fma(sum, keep, exp<S>(S::sub(S::set1(sink), top)));
  }
  const V part = S::div(keep, sum);
  for (int64_t i = 0; i < kv_.value_dim; i += S::kWidth) {
    const V each = S::load(out + i);
    const V kept = rows_.args.sinks == nullptr ? each : S::mul(each, keep);
    store_lanes<S>(y + i, Inner::kDividesOnce ? S::mul(each, part) : S::div(kept, sum), kv_.value_dim - i);
  }
}

}  // namespace
}  // namespace ingot
