// Attention of decode over a 16-bit cache, flash style: a tile has 16 rows, and four warps side by side in tokens,
// whose sums are merged at the end.
//
//   ┌──────┬──────┬──────┬──────┐
//   │warp 0│warp 1│warp 2│warp 3│  16 rows x 16 tokens
//   └──────┴──────┴──────┴──────┘
#pragma once

#include "matrix_units.cuh"
#include "paged_attention.cuh"

constexpr int kStride = kPaddedDim + 8;  // elements of a row in shared memory: an odd number of 16 bytes, no conflicts
constexpr int kDimTiles = kPaddedDim / 16;

template <int kRowWarps>
struct TileShape {
  static constexpr int kColWarps = 4 / kRowWarps;
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kTile = kPaddedDim > 128 && kRowWarps > 1 ? 32 : 64;  // tokens
  static constexpr int kStages = kPaddedDim > 128 ? 1 : 2;
  static constexpr int kWarpTokens = kTile / kColWarps;
};

// Copies tile `tile` of K and of V; rows outside begin .. end - 1 become zeros: their blocks may not be there any more,
// or not yet. Row by row, for what `load_pages` cannot take.
template <int kTile>
INGOT_DEVICE void load_rows(Kv* keys, Kv* values, const Attention& at, const Item& item, int tile, int begin, int end,
                            int kv_head) {
  for (int i = threadIdx.x; i < kTile * kHeadDim; i += kAttentionThreads) {
    const int row = i / kHeadDim, dim = i % kHeadDim, position = tile * kTile + row;
    Kv key{0}, value{0};
    if (position >= begin && position < end) {
      const int64_t slot = at.slot(item, position, kv_head);
      key = as_kv(at.key(slot)[dim]), value = as_kv(at.value(slot)[dim]);
    }
    keys[row * kStride + dim] = key;
    values[row * kStride + dim] = value;
  }
}

// The same, 16 bytes at a time, with one look into the block table for each page that the tile shares: the rows of a
// page lie one behind the other in the pool. A thread copies the same 16 bytes of every kRowsAtOnce-th row.
template <int kTile>
INGOT_DEVICE void load_pages(Kv* keys, Kv* values, const Attention& at, const Item& item, int tile, int begin, int end,
                             int kv_head) {
  constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kAttentionThreads / kChunks;
  constexpr int kPage = kBlockTokens < kTile ? kBlockTokens : kTile;
  const int thread = static_cast<int>(thread_anew()), chunk = thread % kChunks, row = thread / kChunks;
  if (row >= kRowsAtOnce) return;
  const int* table = at.tables + static_cast<int64_t>(item.sequence) * at.table_width;
#pragma unroll
  for (int first = 0; first < kTile; first += kPage) {
    const int position = tile * kTile + first;  // of the page's first row
    const bool some = position < end && position + kPage > begin;
    const int64_t block = some ? table[position / kBlockTokens] : 0;
    const int64_t slot = (block * at.kv_heads + kv_head) * kBlockTokens + position % kBlockTokens + row;
    const Stored* from_keys = at.key(slot) + chunk * 8;
    const Stored* from_values = at.value(slot) + chunk * 8;
    const int to = (first + row) * kStride + chunk * 8;
    const bool all = position >= begin && position + kPage <= end;
    const auto copy = [&](int next, bool valid) {
      copy_eight(keys + to + next * kStride, from_keys + next * kHeadDim, valid);
      copy_eight(values + to + next * kStride, from_values + next * kPaddedDim, valid);
    };
    if (all) {
#pragma unroll
      for (int next = 0; next < kPage; next += kRowsAtOnce) {
        if (kPage % kRowsAtOnce == 0 || row + next < kPage) copy(next, true);
      }
    } else {
      for (int next = 0; row + next < kPage; next += kRowsAtOnce) {
        copy(next, position + row + next >= begin && position + row + next < end);
      }
    }
  }
}

template <int kTile>
INGOT_DEVICE void load_tile(Kv* keys, Kv* values, float* scales, const Attention& at, const Item& item, int tile,
                            int begin, int end, int kv_head) {
  load_scales<kTile, true, true>(scales, at, item, tile, begin, end, kv_head);
  if constexpr (kHeadDim % 8 == 0 && (kTile % kBlockTokens == 0 || kBlockTokens % kTile == 0)) {
    load_pages<kTile>(keys, values, at, item, tile, begin, end, kv_head);
  } else {
    load_rows<kTile>(keys, values, at, item, tile, begin, end, kv_head);
  }
}

template <int kRowWarps>
struct Tile {
  using Shape = TileShape<kRowWarps>;
  float sums[2 * kDimTiles][4];  // rows lane/4 and lane/4 + 8; dims 8 * i + 2 * (lane % 4) and the next
  float top[2];
  float weight[2];
  float scale[2];  // of the two rows' scores
  float slope[2];

  INGOT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kDimTiles; ++i) {
      for (int c = 0; c < 4; ++c) sums[i][c] = 0.f;
    }
    top[0] = top[1] = minus_infinity();
    weight[0] = weight[1] = 0.f;
  }

  // What the tile's rows see of tokens from position `first` on. plain: all rows of the item see all of the warp's
  // tokens, whose scores take a scale alone; the tile's other rows see what they like.
  struct View {
    int first;
    const int (&positions)[2];  // of the two rows' tokens
    bool plain;

    INGOT_DEVICE View(const Attention& at, const Item& item, int begin, const int (&of_rows)[2])
        : first(begin), positions(of_rows) {
      plain = at.softcap <= 0.f && !at.slopes && first + Shape::kWarpTokens - 1 <= item.position &&
              first >= at.first_visible(item.position + item.count - 1);
    }
  };

  // One tile of tokens. scales: of the warp's tokens, behind codes.
  INGOT_DEVICE void attend(const Kv* queries, const Kv* keys, const Kv* values, const float* scales,
                           const Attention& at, const View& view) {
    constexpr int kTokenTiles = Shape::kWarpTokens / 8;
    const int lane = threadIdx.x % kWarp;
    float scores[kTokenTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kDimTiles; ++k) {
      uint32_t a[4];
      load_matrices(a, queries + (lane & 15) * kStride + k * 16 + (lane >> 4) * 8);
#pragma unroll
      for (int n = 0; n < kTokenTiles; n += 2) {
        uint32_t b[4];
        const int token = n * 8 + (lane & 7) + (lane >> 4) * 8;
        load_matrices(b, keys + token * kStride + k * 16 + ((lane >> 3) & 1) * 8);
        multiply_add<Kv>(scores[n], a, b[0], b[1]);
        multiply_add<Kv>(scores[n + 1], a, b[2], b[3]);
      }
    }
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) scores[i / 4][i % 4] *= scales[i / 4 * 8 + 2 * (lane % 4) + i % 2];
    }
    soften(scores, at, view);
    if constexpr (kScaled) {
      const float* of_values = scales + Shape::kTile;
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) {
        float& share = scores[i / 4][i % 4];
        share = scaled_share(share, of_values[i / 4 * 8 + 2 * (lane % 4) + i % 2]);
      }
    }
#pragma unroll
    for (int k = 0; k < kTokenTiles; k += 2) {
      const uint32_t a[4] = {pack_two<Kv>(scores[k][0], scores[k][1]), pack_two<Kv>(scores[k][2], scores[k][3]),
                             pack_two<Kv>(scores[k + 1][0], scores[k + 1][1]),
                             pack_two<Kv>(scores[k + 1][2], scores[k + 1][3])};
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
        uint32_t b[4];
        load_matrices_transposed(b, values + (k * 8 + (lane & 15)) * kStride + d * 16 + (lane >> 4) * 8);
        multiply_add<Kv>(sums[2 * d], a, b[0], b[1]);
        multiply_add<Kv>(sums[2 * d + 1], a, b[2], b[3]);
      }
    }
  }

  // The highest score of one row, whose scores get all but their softmax.
  template <bool kBiased, int kTokenTiles>
  INGOT_DEVICE float bend(float (&scores)[kTokenTiles][4], const Attention& at, int first, int half, int last) {
    const int begin = at.first_visible(last), pair = threadIdx.x % 4;
    float highest = top[half];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        const int position = first + n * 8 + 2 * pair + c % 2;
        const bool visible = position <= last && position >= begin;
        float score = at.bent(scores[n][c] * scale[half]);
        if constexpr (kBiased) score += at.bias(slope[half], last, position);
        scores[n][c] = visible ? score : minus_infinity();
        highest = fmaxf(highest, scores[n][c]);
      }
    }
    return highest;
  }

  // The same of scores that take their scale alone.
  template <int kTokenTiles>
  INGOT_DEVICE float stretch(float (&scores)[kTokenTiles][4], int half) const {
    float highest = top[half];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        scores[n][c] = __fmul_rn(scores[n][c], scale[half]);  // no part of a sum, so that bits are as above
        highest = fmaxf(highest, scores[n][c]);
      }
    }
    return highest;
  }

  // Scores become weights under a running maximum; sums so far are rescaled.
  template <int kTokenTiles>
  INGOT_DEVICE void soften(float (&scores)[kTokenTiles][4], const Attention& at, const View& view) {
    const int first = view.first;
    float tops[2], factors[2];
    if (view.plain) {
#pragma unroll
      for (int half = 0; half < 2; ++half) tops[half] = stretch(scores, half);
    } else if (at.slopes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) tops[half] = bend<true>(scores, at, first, half, view.positions[half]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) tops[half] = bend<false>(scores, at, first, half, view.positions[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = tops[half];
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      const float base = highest == minus_infinity() ? 0.f : highest;  // nothing visible yet
      factors[half] = exp2f((top[half] - base) * kLog2e);
      top[half] = highest;
      weight[half] *= factors[half];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          scores[n][c] = exp2f((scores[n][c] - base) * kLog2e);
          weight[half] += scores[n][c];
        }
      }
    }
    if (!__any_sync(kAllLanes, factors[0] != 1.f || factors[1] != 1.f)) return;  // as in most tiles
#pragma unroll
    for (int i = 0; i < 2 * kDimTiles; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] *= factors[c / 2];
    }
  }

  // Joins the sums of weights of the four lanes that share a row.
  INGOT_DEVICE void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[half] += __shfl_xor_sync(kAllLanes, weight[half], 1);
      weight[half] += __shfl_xor_sync(kAllLanes, weight[half], 2);
    }
  }

  INGOT_DEVICE float sum(int i, int half, int odd) const { return sums[i][2 * half + odd]; }

  INGOT_DEVICE void begin(int (&positions)[2], const Attention& at, const Item& item, int kv_head) {
    clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x / kWarp % kRowWarps * 16 + threadIdx.x % kWarp / 4 + 8 * half;
      const int group = at.heads / at.kv_heads;
      positions[half] = row < item.count * group ? item.position + row / group : -1;  // -1 sees nothing
      scale[half] = at.scale_at(max(positions[half], 0));
      slope[half] = at.slopes ? at.slopes[at.head(row, kv_head)] : 0.f;
    }
  }
};

// Floats from row to row where warps' sums meet: rows that are neighbours lie in other banks.
constexpr int kSumStride = !kCodesAhead ? kHeadDim + 4 : kHeadDim % 32 ? kHeadDim : kHeadDim + 16;

// A warp's sums to shared memory, [16][kSumStride]. to: at the row lane / 4.
INGOT_DEVICE void put_sums(float* to, const Tile<1>& tile, int pair) {
#pragma unroll
  for (int half = 0; half < 2; ++half, to += 8 * kSumStride) {
    if constexpr (kCodesAhead) {  // products of even dims and of odd ones, see decode_codes.cuh
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
        const Four<float> four{{tile.sum(2 * d, half, 0), tile.sum(2 * d + 1, half, 0), tile.sum(2 * d, half, 1),
                                tile.sum(2 * d + 1, half, 1)}};
        *reinterpret_cast<Four<float>*>(to + d * 16 + 4 * pair) = four;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int dim = i * 8 + 2 * pair + odd;
          if (dim < kHeadDim) to[dim] = tile.sum(i, half, odd);
        }
      }
    }
  }
}

// Decode: the four warps' sums meet in shared memory, [4][16][kSumStride] and [4][16][2], where K and V lay until the
// last barrier; then to y, or to the partials. A thread takes four dims of a row, where there are fours.
INGOT_DEVICE void merge_warps(const Tile<1>& tile, float* shared, const Attention& at, const Item& item, int rows,
                              int kv_head) {
  constexpr int kWidth = kHeadDim % 4 == 0 ? 4 : 1;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float* stats = shared + 4 * 16 * kSumStride;
  put_sums(shared + (warp * 16 + lane / 4) * kSumStride, tile, lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + 8 * half;
    if (lane % 4 == 0) stats[2 * row] = tile.top[half], stats[2 * row + 1] = tile.weight[half];
  }
  __syncthreads();
  const int64_t split = (static_cast<int64_t>(blockIdx.x) * at.kv_heads + kv_head) * gridDim.z + blockIdx.z;
  for (int i = threadIdx.x * kWidth; i < rows * kHeadDim; i += kAttentionThreads * kWidth) {
    const int row = i / kHeadDim, dim = i % kHeadDim;
    float top = minus_infinity(), weight = 0.f;
    Four<float> sums{};
    for (int w = 0; w < 4; ++w) top = fmaxf(top, stats[2 * (w * 16 + row)]);
    const float base = top == minus_infinity() ? 0.f : top;
    for (int w = 0; w < 4; ++w) {
      const float factor = exp2f((stats[2 * (w * 16 + row)] - base) * kLog2e);
      const float* from = shared + (w * 16 + row) * kSumStride + dim;
      const Four<float> four = kWidth == 4 ? load_four(from) : Four<float>{{*from}};
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sums.at[c] += four.at[c] * factor;
      weight += stats[2 * (w * 16 + row) + 1] * factor;
    }
    if (gridDim.z == 1) {
      weight = at.with_sink(weight, top, at.head(row, kv_head));
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sums.at[c] /= weight;
      const int64_t to = at.place(item, row, kv_head) * kHeadDim + dim;
      if constexpr (kWidth == 4) {
        store_activations(at.y, to, sums, at.narrow);
      } else {
        store_activation(at.y, to, sums.at[0], at.narrow);
      }
      continue;
    }
    float* to = at.partial + (split * 16 + row) * kHeadDim + dim;
    if constexpr (kWidth == 4) {
      store_four(to, sums);
    } else {
      *to = sums.at[0];
    }
    if (dim == 0) at.stats[(split * 16 + row) * 2] = top, at.stats[(split * 16 + row) * 2 + 1] = weight;
  }
}

// What a block of decode computes: an item's rows of a KV head, over a part of the item's tiles.
struct DecodeBlock {
  Item item;
  int kv_head, rows;
  int begin, end;            // tokens that some row sees
  int begin_tile, end_tile;  // equal where the item has fewer parts: nobody reads what the block would write

  INGOT_DEVICE explicit DecodeBlock(const Attention& at) {
    item = at.items[blockIdx.x], kv_head = blockIdx.y, rows = item.count * (at.heads / at.kv_heads);
    begin = at.first_visible(item.position), end = item.position + item.count;
    const Splits<TileShape<1>::kTile> splits(begin, end, gridDim.z);
    const bool some = static_cast<int>(blockIdx.z) < splits.used;
    begin_tile = some ? splits.first_tile + static_cast<int>(blockIdx.z) * splits.share : 0;
    end_tile = some ? min(splits.first_tile + splits.tiles, begin_tile + splits.share) : 0;
  }

  INGOT_DEVICE void take_queries(Kv* queries, const Attention& at) const {
    for (int i = threadIdx.x; i < TileShape<1>::kRows * kPaddedDim; i += kAttentionThreads) {
      const int row = i / kPaddedDim, dim = i % kPaddedDim;
      const bool valid = row < rows && dim < kHeadDim;
      const float query = valid ? at.q[at.place(item, row, kv_head) * kHeadDim + dim] * kCodeUnit : 0.f;
      queries[row * kStride + dim] = from_float<Kv>(query);
    }
  }
};

template <int kRowWarps>
INGOT_DEVICE void attend_item(unsigned char* memory, const Attention& at) {
  using Shape = TileShape<kRowWarps>;
  const DecodeBlock block(at);
  const Item& item = block.item;
  const int warp = threadIdx.x / kWarp, begin_tile = block.begin_tile, end_tile = block.end_tile;
  if (begin_tile == end_tile) return;
  Kv* queries = reinterpret_cast<Kv*>(memory);
  Kv* keys = queries + Shape::kRows * kStride;
  Kv* values = keys + Shape::kStages * Shape::kTile * kStride;
  float* scales = reinterpret_cast<float*>(values + Shape::kStages * Shape::kTile * kStride);  // of each stage

  const auto load = [&](int index) {
    const int stage = (index - begin_tile) % Shape::kStages * Shape::kTile;
    if (index < end_tile) {
      load_tile<Shape::kTile>(keys + stage * kStride, values + stage * kStride, scales + 2 * stage, at, item, index,
                              block.begin, block.end, block.kv_head);
    }
    copy_commit();
  };
  if constexpr (Shape::kStages == 2) load(begin_tile);  // on its way while the queries come

  block.take_queries(queries, at);
  if constexpr (kHeadDim < kPaddedDim) {  // K and V lie one behind the other, each with kStages tiles
    constexpr int kPad = kHeadDim < kPaddedDim ? kPaddedDim - kHeadDim : 1;
    for (int i = threadIdx.x; i < 2 * Shape::kStages * Shape::kTile * kPad; i += kAttentionThreads) {
      keys[i / kPad * kStride + kHeadDim + i % kPad] = Kv{0};
    }
  }

  Tile<kRowWarps> tile;
  int positions[2];
  tile.begin(positions, at, item, block.kv_head);
  const int row_warp = warp % kRowWarps, col_warp = warp / kRowWarps;
  for (int index = begin_tile; index < end_tile; ++index) {
    load(index + Shape::kStages - 1);
    copy_wait<Shape::kStages - 1>();
    __syncthreads();
    const int stage = (index - begin_tile) % Shape::kStages * Shape::kTile, own = col_warp * Shape::kWarpTokens;
    const int offset = (stage + own) * kStride;
    const typename Tile<kRowWarps>::View view(at, item, index * Shape::kTile + own, positions);
    tile.attend(queries + row_warp * 16 * kStride, keys + offset, values + offset, scales + 2 * stage + own, at, view);
    __syncthreads();
  }
  copy_wait<0>();
  tile.finish();
  merge_warps(tile, reinterpret_cast<float*>(keys), at, item, block.rows, block.kv_head);
}
