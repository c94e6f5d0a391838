// How rows of an item pass over the cache in vectors: tile after tile, which lie anchored to positions whatever the
// size of the cache's blocks, and over the tiles that not all rows see in passes of rows of whole tokens.
//
//   tile       |g0|g1|g2|g3|     groups of 16 tokens, each inside one block
//
// Kernels derive from this and say what a pass does. kWidens: what all rows of an item share takes long, so these are
// more.
#pragma once

#include <algorithm>
#include <utility>

#include "attention/kv_layout.h"
#include "attention/paged_attention_rows.h"
#include "isa/counts.h"

namespace ingot {
namespace {

template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
class AttentionPasses {
 public:
  static constexpr int64_t kLeastItemRows = 48, kItemRows = kWidens ? 96 : kLeastItemRows;
  static constexpr int64_t kTile = kTileTokens;
  static constexpr int kGroups = kTile / kKvLanes;
  static constexpr int kRows = kRowsAtOnce;

  // These tokens of an item are likely to follow what the next call of `attend` is for, which fetches their first tile.
  // The second call of this before one of `attend` says what is likely to follow those.
  void expect(const AttentionItem& item, int64_t begin, int64_t end);

 protected:
  // Where the groups of a tile lie. Groups that no row of the item sees repeat another one's place: their blocks may
  // not be there any more, or not yet.
  struct Tile {
    int64_t begin, groups;
    T* keys[kGroups];
    T* values[kGroups];
    const float* key_scales[kGroups];
    const float* value_scales[kGroups];
  };

  explicit AttentionPasses(const AttentionRows& rows) : rows_(rows), kv_(rows.kv) {}

  // What a row of an item sees, and its slope.
  void set_row(const AttentionItem& item, int64_t row, const AttentionRows::TokenRows& token) {
    seen_begin_[row] = token.hidden;
    seen_end_[row] = token.visible;
    slopes_[row] = rows_.slope(item, item.begin + row);
  }
  // Calls, tile by tile, whole(rows, tile, next) where all rows of the item see it, else part(first row, rows, tile,
  // next) for passes of at most kRows. What `next` holds is to be fetched meanwhile, where it is not `tile`.
  template <typename Whole, typename Part>
  void each_tile(const AttentionItem& item, int64_t begin, int64_t end, Whole whole, Part part);

  const AttentionRows& rows_;
  const PagedKv& kv_;
  int64_t seen_begin_[kItemRows], seen_end_[kItemRows];  // tokens that the item's rows see
  float slopes_[kItemRows];

 private:
  Tile locate(const AttentionItem& item, int64_t begin, int64_t end) const;
  int64_t pass_end(const AttentionItem& item, int64_t first) const;
  static Tile completed(Tile last, const Tile& then);
  void fetch(const Tile& tile, int64_t first) const;

  Tile expected_[2];      // what is likely to follow
  int expects_ = 0;       // so many tiles
  bool fetched_ = false;  // whether the second of them is, as far as the first leaves it no time
};

// The tile from token `begin` on; nobody sees tokens from `end` on.
template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
typename AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::Tile
AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::locate(const AttentionItem& item, int64_t begin,
                                                                 int64_t end) const {
  Tile tile;
  tile.begin = begin;
  tile.groups = begin + kTile <= end ? kGroups : (end - begin + kKvLanes - 1) / kKvLanes;
  const int64_t unseen = (rows_.hidden(item.sequence, item.begin) - begin) / kKvLanes, seen = unseen > 0 ? unseen : 0;
  const int64_t token = begin + seen * kKvLanes;
  const int32_t* block = rows_.blocks(item.sequence) + token / kv_.block_size;
  int64_t slot = token % kv_.block_size;
  for (int64_t g = seen; g < tile.groups; ++g, slot += kKvLanes) {
    if (slot == kv_.block_size) slot = 0, ++block;
    const int64_t place = *block * kv_.block_bytes;
    T* keys = reinterpret_cast<T*>(kv_.keys + place) + item.head * kv_head_size<T>(kv_.head_dim, kv_.block_size);
    T* values = reinterpret_cast<T*>(kv_.values + place) + item.head * kv_head_size<T>(kv_.padded_dim, kv_.block_size);
    tile.keys[g] = key_lines(keys, kv_.head_dim, slot);
    tile.values[g] = value_line(values, slot);
    tile.key_scales[g] = kv_scales(keys, kv_.head_dim, kv_.block_size) + slot;
    tile.value_scales[g] = kv_scales(values, kv_.padded_dim, kv_.block_size) + slot;
  }
  for (int64_t g = 0; g < kGroups; ++g) {
    if (g >= seen && g < tile.groups) continue;
    tile.keys[g] = tile.keys[seen];
    tile.values[g] = tile.values[seen];
    tile.key_scales[g] = tile.key_scales[seen];
    tile.value_scales[g] = tile.value_scales[seen];
  }
  return tile;
}

// Asks memory for the groups of a tile from `first` on; loops over the tile before it do so for the groups that they
// read.
template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
void AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::fetch(const Tile& tile, int64_t first) const {
  for (int64_t g = first; g < tile.groups; ++g) {
    for (int64_t d = 0; d < kv_.head_dim; d += kPair<T>) S::prefetch_far(tile.keys[g] + d * kKvLanes);
    for (int64_t d = 0; d < kv_.padded_dim; d += kKvLanes)
      for (int64_t t = 0; t < kKvLanes; t += kPair<T>)
        S::prefetch_far(tile.values[g] + d * kv_.block_size + t * kKvLanes);
  }
}

// A last tile to be fetched while the tile before it is in work; its places without a group are for what is expected
// behind it, which the few groups of a last tile would leave little time for.
template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
typename AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::Tile
AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::completed(Tile last, const Tile& then) {
  std::copy(then.keys + last.groups, then.keys + kGroups, last.keys + last.groups);
  std::copy(then.values + last.groups, then.values + kGroups, last.values + last.groups);
  return last;
}

template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
void AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::expect(const AttentionItem& item, int64_t begin,
                                                                      int64_t end) {
  if (begin >= end || expects_ == 2) return;
  expected_[expects_++] = locate(item, begin / kTile * kTile, end);
  rows_.sources(item, [](const float* q, int64_t count) {
    for (int64_t i = 0; i < count; i += kKvLanes) S::prefetch_far(q + i);
  });
}

template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
template <typename Whole, typename Part>
void AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::each_tile(const AttentionItem& item, int64_t begin,
                                                                         int64_t end, Whole whole, Part part) {
  const int64_t rows = item.end - item.begin;
  if (begin >= end) {
    expects_ = 0;
    return;
  }
  Tile tile = locate(item, begin / kTile * kTile, end);
  bool fetched = std::exchange(fetched_, false) || expects_ == 0;  // what is expected, from the last tile's groups on
  while (tile.begin < end) {
    const bool last = tile.begin + kTile >= end;
    const Tile next = !last ? locate(item, tile.begin + kTile, end) : expects_ > 0 ? expected_[0] : tile;
    if (last && !fetched) fetch(expected_[0], tile.groups);
    if constexpr (kScaled<T>) {  // the loops over codes fetch the next tile's codes
      for (int g = 0; g < kGroups; ++g) {
        S::prefetch_far(next.key_scales[g]);
        S::prefetch_far(next.value_scales[g]);
      }
    }
    if (seen_begin_[rows - 1] <= tile.begin && tile.begin + kTile <= seen_end_[0]) {
      if (!last && !fetched && next.begin + kTile >= end) {
        whole(rows, tile, completed(next, expected_[0]));
        fetched = true;
      } else if (last && expects_ == 2 && next.groups < kGroups) {
        whole(rows, tile, completed(next, expected_[1]));
        fetched_ = true;
      } else {
        whole(rows, tile, next);
      }
    } else {
      for (int64_t first = 0, stop = 0; first < rows; first = stop) {
        stop = pass_end(item, first);
        part(first, stop - first, tile, first == 0 ? next : tile);
      }
    }
    if (last) break;
    tile = next;
  }
  expects_ = 0;
}

// Where a pass over a tile from row `first` on ends: with a token, so that its rows see as many.
template <typename S, typename T, int64_t kTileTokens, int kRowsAtOnce, bool kWidens>
int64_t AttentionPasses<S, T, kTileTokens, kRowsAtOnce, kWidens>::pass_end(const AttentionItem& item,
                                                                           int64_t first) const {
  const int64_t most = item.begin + first + kRows, whole = most / rows_.group * rows_.group;
  if (most >= item.end) return item.end - item.begin;
  return (whole > item.begin + first ? whole : most) - item.begin;
}

}  // namespace
}  // namespace ingot
