// Causal attention over a latent cache in float32: an online softmax over tiles of 64 tokens, anchored to positions.
// Items, splits and threads: paged_attention_rows.h.
//
//   tile   rows of tokens, widened once for all heads: scores [heads][64] = q . row, then out += weight * row[: rank]
//
// The rows of an item that are one token's heads see the same tokens, and these alone are touched: a row of queries
// runs through the same operations whatever shares its registers, its item, its step or its thread.
//
// Floors, of a head and token: 2 * (head_dim + rank) operations by FMA; of a token: head_dim * itemsize bytes, read
// once for all heads.
#pragma once

#include <algorithm>
#include <utility>

#include "attention/latent_attention_args.h"
#include "attention/paged_attention_rows.h"
#include "attention/paged_attention_softmax.h"

namespace ingot {
namespace {

template <typename S, typename T>
class LatentInner {
 public:
  using V = typename S::V;
  static constexpr int64_t kItemRows = 48;
  static constexpr bool kSetsOut = false, kDividesOnce = false;
  static constexpr int64_t kTile = 64;
  static constexpr int kRows = S::kRegisters >= 32 ? 4 : 2;  // of queries, at once
  static constexpr int kTokens = 4, kDims = 4;               // tokens, or vectors of dims, at once

  explicit LatentInner(const AttentionRows& rows) : rows_(rows), kv_(rows.kv), stride_(stride(rows.kv)) {}

  static int64_t floats(const PagedKv& kv) { return kItemRows * (stride(kv) + kTile + 1) + kTile * stride(kv); }
  void allocate(float* memory) {
    q_ = memory;
    panel_ = q_ + kItemRows * stride_;
    p_ = panel_ + kTile * stride_;
    factors_ = p_ + kItemRows * kTile;
  }

  void load_queries(const AttentionItem& item, float* rotated) {
    rows_.tokens(item, rotated, [&](const AttentionRows::TokenRows& token) {
      const float* q = token.queries;
      for (int64_t row = token.begin - item.begin; row < token.end - item.begin; ++row, q += kv_.head_dim) {
        visible_[row] = token.visible;
        for (int64_t i = 0; i < stride_; i += S::kWidth) {
          const int64_t n = std::max<int64_t>(kv_.head_dim - i, 0);
          S::store(q_ + row * stride_ + i, S::mul(load_lanes<S>(q + i, n), S::set1(rows_.args.scale)));
        }
      }
    });
  }

  void attend(const AttentionItem& item, int64_t begin, int64_t end, const RowState& state) {
    const int64_t rows = item.end - item.begin;
    for (int64_t tile = begin; tile < end; tile += kTile) {
      widen(item, tile, std::min(tile + kTile, end));
      item_ = &item;
      asked_ = std::min(tile + kTile, end);
      asked_end_ = std::min(asked_ + kTile, end);
      for (int64_t first = 0, last; first < rows; first = last) {
        last = first + 1;
        while (last < rows && visible_[last] == visible_[first]) ++last;
        const int64_t seen = std::min({visible_[first], tile + kTile, end}) - tile;
        if (seen > 0) attend_token(first, last, seen, state);
      }
    }
  }

 private:
  static int64_t stride(const PagedKv& kv) { return (kv.head_dim + 15) / 16 * 16; }

  const T* row_of(const AttentionItem& item, int64_t token) const {
    const std::byte* block = kv_.keys + rows_.block(item.sequence, token) * kv_.block_bytes;
    return reinterpret_cast<const T*>(block) + token % kv_.block_size * kv_.head_dim;
  }

  // Rows of tokens begin .. end-1 to the panel, zeros behind each.
  void widen(const AttentionItem& item, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* row = row_of(item, token);
      for (int64_t i = 0; i < stride_; i += S::kWidth)
        S::store(panel_ + (token - begin) * stride_ + i,
                 load_lanes<S>(row + i, std::max<int64_t>(kv_.head_dim - i, 0)));
    }
  }

  // Rows first .. last-1, heads of one token, over the first `seen` tokens of the panel. A few tokens, or dims, of the
  // panel stay in the L1 cache for all rows.
  void attend_token(int64_t first, int64_t last, int64_t seen, const RowState& state) {
    int64_t token = 0;
    for (; token + kTokens <= seen; token += kTokens) score<kTokens>(first, last, token);
    for (; token < seen; ++token) score<1>(first, last, token);
    softmax_rows<S, kTile, false>(
        last - first, p_ + first * kTile, false, [](int64_t, int64_t, typename S::V v) { return v; }, state.top + first,
        state.sum + first, factors_ + first, [seen](int64_t) { return std::pair<int64_t, int64_t>{0, seen}; },
        [](float* p, int64_t i, V weights) { S::store(p + i, weights); });
    int64_t dim = 0;
    for (; dim + kDims * S::kWidth <= kv_.padded_dim; dim += kDims * S::kWidth)
      weigh<kDims>(first, last, dim, seen, state);
    for (; dim < kv_.padded_dim; dim += S::kWidth) weigh<1>(first, last, dim, seen, state);
  }

  template <int kN>
  void score(int64_t first, int64_t last, int64_t token) {
    int64_t row = first;
    for (; row + kRows <= last; row += kRows) {
      score_tokens<kRows, kN>(row, token);
      ask();
    }
    for (; row < last; ++row) score_tokens<1, kN>(row, token);
  }

  template <int kR, int kN>
  void score_tokens(int64_t row, int64_t token) {
    V sums[kR][kN];
    for (auto& each : sums) std::fill_n(each, kN, S::zero());
    const float *q = q_ + row * stride_, *keys = panel_ + token * stride_;
    for (int64_t i = 0; i < stride_; i += S::kWidth) {
      V key[kN];
#pragma GCC unroll 4
      for (int t = 0; t < kN; ++t) key[t] = S::load(keys + t * stride_ + i);
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) {
        const V each = S::load(q + r * stride_ + i);
#pragma GCC unroll 4
        for (int t = 0; t < kN; ++t) sums[r][t] = S::fma(each, key[t], sums[r][t]);
      }
    }
    if constexpr (kR % 2 == 0 && kN == 4 && requires(const V(&eight)[8]) { S::reduce_add(eight); }) {
      for (int r = 0; r < kR; r += 2) {
        const V eight[8] = {sums[r][0],     sums[r][1],     sums[r][2],     sums[r][3],
                            sums[r + 1][0], sums[r + 1][1], sums[r + 1][2], sums[r + 1][3]};
        alignas(64) float scores[S::kWidth];
        S::store(scores, S::reduce_add(eight));
        for (int half = 0; half < 2; ++half) std::copy_n(scores + 4 * half, 4, p_ + (row + r + half) * kTile + token);
      }
    } else {
      for (int r = 0; r < kR; ++r)
        for (int t = 0; t < kN; ++t) p_[(row + r) * kTile + token + t] = S::reduce_add(sums[r][t]);
    }
  }

  // Asks memory for one more row of the next tile.
  void ask() {
    if (asked_ >= asked_end_) return;
    const auto* row = reinterpret_cast<const char*>(row_of(*item_, asked_++));
    for (int64_t i = 0; i < kv_.head_dim * static_cast<int64_t>(sizeof(T)); i += 64) S::prefetch_far(row + i);
  }

  template <int kN>
  void weigh(int64_t first, int64_t last, int64_t dim, int64_t seen, const RowState& state) {
    int64_t row = first;
    for (; row + kRows <= last; row += kRows) weigh_dims<kRows, kN>(row, dim, seen, state, (row - first) / kRows);
    for (; row < last; ++row) weigh_dims<1, kN>(row, dim, seen, state, row - first);
  }

  // turn: of the rows. With the wide vectors, each of the first ones asks the L1 cache for a part of the next dims;
  // with narrow ones that gains nothing.
  template <int kR, int kN>
  void weigh_dims(int64_t row, int64_t dim, int64_t seen, const RowState& state, int64_t turn) {
    V sums[kR][kN];
    float* out = state.out + row * kv_.padded_dim + dim;
    for (int r = 0; r < kR; ++r)
      for (int j = 0; j < kN; ++j)
        sums[r][j] = S::mul(S::load(out + r * kv_.padded_dim + j * S::kWidth), S::set1(factors_[row + r]));
    const float *values = panel_ + dim, *weights = p_ + row * kTile;
    const int64_t ahead = kN * S::kWidth + 16 * std::min<int64_t>(turn, kN * S::kWidth / 16);
    for (int64_t token = 0; token < seen; ++token, values += stride_) {
      if constexpr (kRows == 4) S::prefetch(values + ahead);
      V value[kN];
#pragma GCC unroll 4
      for (int j = 0; j < kN; ++j) value[j] = S::load(values + j * S::kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) {
        const V weight = S::set1(weights[r * kTile + token]);
#pragma GCC unroll 4
        for (int j = 0; j < kN; ++j) sums[r][j] = S::fma(weight, value[j], sums[r][j]);
      }
    }
    for (int r = 0; r < kR; ++r)
      for (int j = 0; j < kN; ++j) S::store(out + r * kv_.padded_dim + j * S::kWidth, sums[r][j]);
  }

  const AttentionRows& rows_;
  const PagedKv& kv_;
  const int64_t stride_;      // of queries and of the panel: head_dim rounded up to 16
  float* q_ = nullptr;        // [kItemRows][stride], scaled
  float* panel_ = nullptr;    // [kTile][stride]
  float* p_ = nullptr;        // [kItemRows][kTile]
  float* factors_ = nullptr;  // [kItemRows], by which what rows have gathered so far is still to be multiplied
  const AttentionItem* item_ = nullptr;
  int64_t asked_ = 0, asked_end_ = 0;  // tokens of the next tile that memory is still to be asked for
  int64_t visible_[kItemRows];
};

template <typename S, typename T>
void latent_attention(const LatentAttentionArgs& args, const Team& team) {
  PagedAttention<S, LatentInner<S, T>>(args).run(team);
}

template <typename S, typename T>
size_t latent_attention_scratch(const void* args) {
  return PagedAttention<S, LatentInner<S, T>>::shared_bytes(static_cast<const LatentAttentionArgs*>(args)->kv);
}

}  // namespace
}  // namespace ingot
