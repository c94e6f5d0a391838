// Where attention finds its rows and tokens, and what it does to a score.
//
// The query rows of one KV head are packed: row r of a tile is token r / group and query head r % group of an item, so
// that one tile of K and V serves the whole group, in decode as in prefill.
#pragma once

#include "kv_cache.cuh"

constexpr int kAttentionThreads = 128;
constexpr int kBlockTokens = INGOT_TOKENS_PER_BLOCK;
using KeySlots = Slots<kHeadDim, kBlockTokens>;
using ValueSlots = Slots<kPaddedDim, kBlockTokens>;

// A run of tokens of one sequence whose rows fit a tile.
struct Item {
  int sequence;
  int token;     // the first, as an index into the step's tokens
  int count;     // tokens
  int position;  // of the first token
};

struct Attention {
  void* y;               // [tokens][heads][head_dim]
  const float* q;        // [tokens][heads][head_dim]
  const Stored* keys;    // of this layer: [blocks][kv_heads][tokens_per_block][head_dim]
  const Stored* values;  // [blocks][kv_heads][tokens_per_block][padded_dim]
  const Item* items;
  const int* tables;  // [sequences][table_width]
  float* partial;     // [items][kv_heads][splits][16][head_dim]: sums of splits, before division
  float* stats;       // [items][kv_heads][splits][16][2]: top score and sum of weights
  int table_width;
  int heads;
  int kv_heads;
  int window;  // 0: none
  float scale;
  float softcap;        // 0: none
  const float* sinks;   // [heads]: scores of a token whose value is zero; or null
  const float* slopes;  // [heads]: of ALiBi; or null
  int bf16_bias;        // its bias is made of rounded positions, as the op says
  float growth;         // of queries with their position; 0: none
  int growth_every;
  int narrow;

  INGOT_DEVICE int64_t slot(const Item& item, int position, int kv_head) const {
    const int64_t block = tables[static_cast<int64_t>(item.sequence) * table_width + position / kBlockTokens];
    return (block * kv_heads + kv_head) * kBlockTokens + position % kBlockTokens;
  }
  INGOT_DEVICE const Stored* key(int64_t slot) const { return keys + KeySlots::row(slot); }
  INGOT_DEVICE const Stored* value(int64_t slot) const { return values + ValueSlots::row(slot); }
  INGOT_DEVICE float key_scale(int64_t slot) const {
    return *reinterpret_cast<const float*>(keys + KeySlots::scale(slot));
  }
  INGOT_DEVICE float value_scale(int64_t slot) const {
    return *reinterpret_cast<const float*>(values + ValueSlots::scale(slot));
  }
  INGOT_DEVICE int head(int row, int kv_head) const {
    const int group = heads / kv_heads;
    return kv_head * group + row % group;
  }
  // The row's place in q and y, in heads.
  INGOT_DEVICE int64_t place(const Item& item, int row, int kv_head) const {
    return static_cast<int64_t>(item.token + row / (heads / kv_heads)) * heads + head(row, kv_head);
  }
  INGOT_DEVICE int first_visible(int position) const {
    return window && position >= window ? position + 1 - window : 0;
  }
  // Of the scores of the token at a position.
  INGOT_DEVICE float scale_at(int position) const {
    return growth > 0.f ? scale * (1.f + growth * logf(1.f + position / growth_every)) : scale;
  }
  INGOT_DEVICE float bent(float score) const { return softcap > 0.f ? softcap * tanhf(score / softcap) : score; }
  // What is added to the score of the token at `position`, seen from that at `last`.
  INGOT_DEVICE float bias(float slope, int last, int position) const {
    if (!bf16_bias) return slope * static_cast<float>(position - last);
    const float rounded = to_float(from_float<BF16>(static_cast<float>(position)));
    return to_float(from_float<BF16>(__fmul_rn(slope, rounded))) * scale;
  }
  // The sum of weights of a head, with its sink. top: the highest score, on which the weights are based.
  INGOT_DEVICE float with_sink(float weight, float top, int head) const {
    return sinks ? weight + exp2f((sinks[head] - top) * kLog2e) : weight;
  }
};

// How the tiles of an item are shared: the first `used` of `splits` have some.
template <int kTile>
struct Splits {
  int first_tile, tiles, share, used;

  INGOT_DEVICE Splits(int begin, int end, int splits) {
    first_tile = begin / kTile;
    tiles = (end + kTile - 1) / kTile - first_tile;
    share = (tiles + splits - 1) / splits;
    used = (tiles + share - 1) / share;
  }
};

// Where the cache has codes: the scales of the tokens of a tile, of their keys, then of their values. Those of tokens
// outside begin .. end - 1 are zero.
template <int kTile, bool kKeys, bool kValues>
INGOT_DEVICE void load_scales(float* to, const Attention& at, const Item& item, int tile, int begin, int end,
                              int kv_head) {
  if constexpr (kScaled) {
    if (threadIdx.x >= kTile) return;
    const int position = tile * kTile + static_cast<int>(threadIdx.x);
    const bool there = position >= begin && position < end;
    const int64_t slot = there ? at.slot(item, position, kv_head) : 0;
    if constexpr (kKeys) to[threadIdx.x] = there ? at.key_scale(slot) : 0.f;
    if constexpr (kValues) to[kTile + threadIdx.x] = there ? at.value_scale(slot) : 0.f;
  }
}
// A weight times the scale of its value: of tokens that a row does not see, nothing, even if their scale is NaN.
INGOT_DEVICE float scaled_share(float share, float scale) { return share > 0.f ? share * (scale * kCodeUnit) : 0.f; }

// The parameters of every attention kernel, and the struct they make.
#define INGOT_ATTENTION_PARAMETERS                                                                                    \
  void *y, const float *q, const Stored *keys, const Stored *values, const Item *items, const int *tables,            \
      float *partial, float *stats, int table_width, int heads, int kv_heads, int window, float scale, float softcap, \
      const float *sinks, const float *slopes, int bf16_bias, float growth, int growth_every, int narrow
#define INGOT_ATTENTION                                                                                             \
  Attention {                                                                                                       \
    y, q, keys, values, items, tables, partial, stats, table_width, heads, kv_heads, window, scale, softcap, sinks, \
        slopes, bf16_bias, growth, growth_every, narrow                                                             \
  }
