// Causal attention over pages, flash style: 16-bit caches on the matrix units, float32 caches warp by warp.
//
//   tile of decode: 16 rows, four warps side by side in tokens, merged at the end
//   ┌──────┬──────┬──────┬──────┐
//   │warp 0│warp 1│warp 2│warp 3│  16 rows x 16 tokens          tile of prefill: see prefill_attention.cuh
//   └──────┴──────┴──────┴──────┘
//
// Heads of more than 256 dims: see wide_attention.cuh.
//
// Grid: (items, kv_heads, splits). A split of decode takes an equal share of the item's KV tiles; combine merges the
// splits.
#include "paged_attention.cuh"

constexpr int kAttentionThreads = 128;

#ifndef INGOT_KV_IS_F32
#if INGOT_HEAD_DIM > 256
#include "wide_attention.cuh"

constexpr int kDecodeTile = WideShape<16>::kTile;

INGOT_KERNEL_TO_SHARE(WideShape<32>::kThreads, 2) attention_prefill(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ WideWork<32> work;
  const PrefillBlock block(kv_heads);
  attend_wide<32>(memory, work, INGOT_ATTENTION, block.item, block.part, block.kv_head);
}

INGOT_KERNEL_TO_SHARE(WideShape<16>::kThreads, 2) attention_decode(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ WideWork<16> work;
  attend_wide<16>(memory, work, INGOT_ATTENTION, blockIdx.x, 0, blockIdx.y);
}

#else
#include "matrix_units.cuh"
#include "prefill_attention.cuh"
#ifdef INGOT_WARPGROUPS
#include "prompt_attention.cuh"
#endif

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
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
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

  // One tile of tokens: `first` is the position of this warp's first token, `positions` those of its two rows. scales:
  // of the warp's tokens, behind codes.
  INGOT_DEVICE void attend(const Kv* queries, const Kv* keys, const Kv* values, const float* scales,
                           const Attention& at, int first, const int (&positions)[2]) {
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
    soften(scores, at, first, positions);
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

  // Scores become weights under a running maximum; sums so far are rescaled.
  template <int kTokenTiles>
  INGOT_DEVICE void soften(float (&scores)[kTokenTiles][4], const Attention& at, int first, const int (&positions)[2]) {
    float tops[2];
    if (at.slopes) {
#pragma unroll
      for (int half = 0; half < 2; ++half) tops[half] = bend<true>(scores, at, first, half, positions[half]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) tops[half] = bend<false>(scores, at, first, half, positions[half]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = tops[half];
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      const float base = highest == minus_infinity() ? 0.f : highest;  // nothing visible yet
      const float factor = exp2f((top[half] - base) * kLog2e);
      top[half] = highest;
      weight[half] *= factor;
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
        sums[i][2 * half] *= factor;
        sums[i][2 * half + 1] *= factor;
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          scores[n][c] = exp2f((scores[n][c] - base) * kLog2e);
          weight[half] += scores[n][c];
        }
      }
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

  INGOT_DEVICE float sum(int dim_tile, int half, int odd) const { return sums[dim_tile][2 * half + odd]; }
};

// Decode: the four warps' sums meet in shared memory, [4][16][head_dim] and [4][16][2], where K and V lay until the
// last barrier; then to y, or to the partials.
INGOT_DEVICE void merge_warps(const Tile<1>& tile, float* shared, const Attention& at, const Item& item, int rows,
                              int kv_head) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float* stats = shared + 4 * 16 * kHeadDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + 8 * half;
#pragma unroll
    for (int i = 0; i < 2 * kDimTiles; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int dim = i * 8 + 2 * (lane % 4) + odd;
        if (dim < kHeadDim) shared[row * kHeadDim + dim] = tile.sum(i, half, odd);
      }
    }
    if (lane % 4 == 0) stats[2 * row] = tile.top[half], stats[2 * row + 1] = tile.weight[half];
  }
  __syncthreads();
  const int64_t split = (static_cast<int64_t>(blockIdx.x) * at.kv_heads + kv_head) * gridDim.z + blockIdx.z;
  for (int i = threadIdx.x; i < rows * kHeadDim; i += kAttentionThreads) {
    const int row = i / kHeadDim, dim = i % kHeadDim;
    float top = minus_infinity(), sum = 0.f, weight = 0.f;
    for (int w = 0; w < 4; ++w) top = fmaxf(top, stats[2 * (w * 16 + row)]);
    const float base = top == minus_infinity() ? 0.f : top;
    for (int w = 0; w < 4; ++w) {
      const float factor = exp2f((stats[2 * (w * 16 + row)] - base) * kLog2e);
      sum += shared[(w * 16 + row) * kHeadDim + dim] * factor;
      weight += stats[2 * (w * 16 + row) + 1] * factor;
    }
    if (gridDim.z == 1) {
      weight = at.with_sink(weight, top, at.head(row, kv_head));
      store_activation(at.y, at.place(item, row, kv_head) * kHeadDim + dim, sum / weight, at.narrow);
      continue;
    }
    at.partial[(split * 16 + row) * kHeadDim + dim] = sum;
    if (dim == 0) at.stats[(split * 16 + row) * 2] = top, at.stats[(split * 16 + row) * 2 + 1] = weight;
  }
}

template <int kRowWarps>
INGOT_DEVICE void attend_item(unsigned char* memory, const Attention& at) {
  using Shape = TileShape<kRowWarps>;
  const Item item = at.items[blockIdx.x];
  const int kv_head = blockIdx.y, rows = item.count * (at.heads / at.kv_heads);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Kv* queries = reinterpret_cast<Kv*>(memory);
  Kv* keys = queries + Shape::kRows * kStride;
  Kv* values = keys + Shape::kStages * Shape::kTile * kStride;
  float* scales = reinterpret_cast<float*>(values + Shape::kStages * Shape::kTile * kStride);  // of each stage

  const int begin = at.first_visible(item.position), end = item.position + item.count;
  const Splits<Shape::kTile> splits(begin, end, gridDim.z);
  if (static_cast<int>(blockIdx.z) >= splits.used) return;  // nobody reads what it would write
  const int begin_tile = splits.first_tile + blockIdx.z * splits.share;
  const int end_tile = min(splits.first_tile + splits.tiles, begin_tile + splits.share);

  const auto load = [&](int index) {
    const int stage = (index - begin_tile) % Shape::kStages * Shape::kTile;
    if (index < end_tile) {
      load_tile<Shape::kTile>(keys + stage * kStride, values + stage * kStride, scales + 2 * stage, at, item, index,
                              begin, end, kv_head);
    }
    copy_commit();
  };
  if constexpr (Shape::kStages == 2) load(begin_tile);  // on its way while the queries come

  for (int i = threadIdx.x; i < Shape::kRows * kPaddedDim; i += kAttentionThreads) {
    const int row = i / kPaddedDim, dim = i % kPaddedDim;
    const bool valid = row < rows && dim < kHeadDim;
    queries[row * kStride + dim] = from_float<Kv>(valid ? at.q[at.place(item, row, kv_head) * kHeadDim + dim] : 0.f);
  }
  if constexpr (kHeadDim < kPaddedDim) {  // K and V lie one behind the other, each with kStages tiles
    constexpr int kPad = kHeadDim < kPaddedDim ? kPaddedDim - kHeadDim : 1;
    for (int i = threadIdx.x; i < 2 * Shape::kStages * Shape::kTile * kPad; i += kAttentionThreads) {
      keys[i / kPad * kStride + kHeadDim + i % kPad] = Kv{0};
    }
  }

  Tile<kRowWarps> tile;
  tile.clear();
  const int row_warp = warp % kRowWarps, col_warp = warp / kRowWarps;
  int positions[2];
  for (int half = 0; half < 2; ++half) {
    const int row = row_warp * 16 + lane / 4 + 8 * half;
    positions[half] = row < rows ? item.position + row / (at.heads / at.kv_heads) : -1;  // -1 sees nothing
    tile.scale[half] = at.scale_at(max(positions[half], 0));
    tile.slope[half] = at.slopes ? at.slopes[at.head(row, kv_head)] : 0.f;
  }
  for (int index = begin_tile; index < end_tile; ++index) {
    load(index + Shape::kStages - 1);
    copy_wait<Shape::kStages - 1>();
    __syncthreads();
    const int stage = (index - begin_tile) % Shape::kStages * Shape::kTile, own = col_warp * Shape::kWarpTokens;
    const int offset = (stage + own) * kStride;
    tile.attend(queries + row_warp * 16 * kStride, keys + offset, values + offset, scales + 2 * stage + own, at,
                index * Shape::kTile + col_warp * Shape::kWarpTokens, positions);
    __syncthreads();
  }
  copy_wait<0>();
  tile.finish();
  merge_warps(tile, reinterpret_cast<float*>(keys), at, item, rows, kv_head);
}

#ifdef INGOT_WARPGROUPS
INGOT_KERNEL(PromptShape::kThreads)
attention_prompt(INGOT_ATTENTION_PARAMETERS, const int* items_of_step, int parts) {
  wait_for_previous();
  INGOT_SHARED_WIDE(wide);
  __shared__ PromptSignals signals;
  const Attention at = INGOT_ATTENTION;
  attend_pieces<false>(wide, signals, at, *items_of_step, parts);
}

// The same of scores that take more than a scale.
INGOT_KERNEL(PromptShape::kThreads)
attention_prompt_bent(INGOT_ATTENTION_PARAMETERS, const int* items_of_step, int parts) {
  wait_for_previous();
  INGOT_SHARED_WIDE(wide);
  __shared__ PromptSignals signals;
  const Attention at = INGOT_ATTENTION;
  attend_pieces<true>(wide, signals, at, *items_of_step, parts);
}
#else
INGOT_KERNEL_TO_SHARE(PrefillShape::kThreads, PrefillShape::kBlocks)
attention_prefill(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ PrefillWork work;
  attend_prompt(memory, work, INGOT_ATTENTION);
}
#endif

INGOT_KERNEL(kAttentionThreads) attention_decode(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  attend_item<1>(memory, INGOT_ATTENTION);
}
constexpr int kDecodeTile = TileShape<1>::kTile;
#endif

// y = the splits of attention_decode, weighted. Grid: as attention_decode's; the blocks of an item share its elements.
INGOT_KERNEL(kAttentionThreads)
attention_combine(void* y, const Item* items, const float* partial, const float* stats, int heads, int kv_heads,
                  int window, const float* sinks, int narrow) {
  constexpr int kMostSplits = 64, kRows = 16;  // MAX_SPLITS in shapes.py
  __shared__ float factors[kRows][kMostSplits], weights[kRows];
  let_next_begin();
  wait_for_previous();
  const int splits = gridDim.z, kv_head = blockIdx.y, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Attention at{};
  at.heads = heads, at.kv_heads = kv_heads, at.window = window, at.sinks = sinks;
  const Item item = items[blockIdx.x];
  const int rows = item.count * (heads / kv_heads), begin = blockIdx.z * kAttentionThreads;
  if (begin >= rows * kHeadDim) return;
  const int end = item.position + item.count;
  const int used = Splits<kDecodeTile>(at.first_visible(item.position), end, splits).used;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kv_heads + kv_head) * splits;
  for (int row = warp; row < rows; row += kAttentionThreads / kWarp) {  // a lane takes two splits
    float tops[2], own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int split = lane + i * kWarp;
      const float* from = stats + ((first + (split < used ? split : 0)) * kRows + row) * 2;
      tops[i] = split < used ? from[0] : minus_infinity(), own[i] = split < used ? from[1] : 0.f;
    }
    float top = fmaxf(tops[0], tops[1]), weight = 0.f;
    for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = exp2f((tops[i] - top) * kLog2e);
      factors[row][lane + i * kWarp] = factor;
      weight += own[i] * factor;
    }
    weight = warp_sum(weight);
    if (lane == 0) weights[row] = at.with_sink(weight, top, at.head(row, kv_head));  // once, whatever the splits
  }
  __syncthreads();
  for (int i = begin + threadIdx.x; i < rows * kHeadDim; i += splits * kAttentionThreads) {
    const int row = i / kHeadDim, dim = i % kHeadDim;
    const float* from = partial + (first * kRows + row) * kHeadDim + dim;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < used; ++split) {
      sum += from[static_cast<int64_t>(split) * kRows * kHeadDim] * factors[row][split];
    }
    store_activation(y, at.place(item, row, kv_head) * kHeadDim + dim, sum / weights[row], narrow);
  }
}

#else  // a float32 cache: for comparisons, not for speed

// A warp takes every fourth row of the item, token by token. Grid: (items, kv_heads)
INGOT_KERNEL(kAttentionThreads) attention_rows(INGOT_ATTENTION_PARAMETERS) {
  wait_for_previous();
  constexpr int kPerLane = (kHeadDim + kWarp - 1) / kWarp;
  const Attention at = INGOT_ATTENTION;
  const Item item = at.items[blockIdx.x];
  const int kv_head = blockIdx.y, group = at.heads / at.kv_heads, lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < item.count * group; row += kAttentionThreads / kWarp) {
    const int64_t place = at.place(item, row, kv_head) * kHeadDim;
    const int last = item.position + row / group;
    const float scale = at.scale_at(last), slope = at.slopes ? at.slopes[at.head(row, kv_head)] : 0.f;
    float query[kPerLane], sums[kPerLane], top = minus_infinity(), weight = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      query[i] = i * kWarp + lane < kHeadDim ? at.q[place + i * kWarp + lane] : 0.f;
      sums[i] = 0.f;
    }
    for (int position = at.first_visible(last); position <= last; ++position) {
      const int64_t slot = at.slot(item, position, kv_head);
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kWarp + lane;
        if (dim < kHeadDim) score += query[i] * number_of(at.key(slot)[dim]);
      }
      score = warp_sum(score) * scale;
      if constexpr (kScaled) score *= at.key_scale(slot);
      score = at.bent(score);
      if (at.slopes) score += at.bias(slope, last, position);
      const float highest = fmaxf(top, score);
      const float factor = expf(top - highest), share = expf(score - highest);
      top = highest;
      weight = weight * factor + share;
      const float scaled = kScaled ? share * at.value_scale(slot) : share;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kWarp + lane;
        if (dim < kHeadDim) sums[i] = sums[i] * factor + scaled * number_of(at.value(slot)[dim]);
      }
    }
    weight = at.with_sink(weight, top, at.head(row, kv_head));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int dim = i * kWarp + lane;
      if (dim < kHeadDim) store_activation(at.y, place + dim, sums[i] / weight, at.narrow);
    }
  }
}
#endif
