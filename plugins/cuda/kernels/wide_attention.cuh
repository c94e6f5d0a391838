// Attention with heads of more than 256 dims over a 16-bit cache, whose sums no warp could hold alone.
//
//   scores: 16 rows x 8 tokens each           sums: all rows x a quarter of the dims each
//   ┌──────┬──────┬──────┬──────┐             ┌──────┬──────┬──────┬──────┐
//   │warp 0│warp 1│warp 2│warp 3│  weights ▶  │warp 0│warp 1│warp 2│warp 3│
//   └──────┴──────┴──────┴──────┘             └──────┴──────┴──────┴──────┘
//
// Weights go from one to the other through shared memory. Decode has 16 rows and tiles of 32 tokens; prompts have 32
// rows, whose warps share tiles of 16 tokens two by two. K and V have one stage each: V comes while scores are
// computed, and the next K while values are added up. What a row gets does not depend on the other rows of its tile.
#pragma once

#include "matrix_units.cuh"
#include "prefill_attention.cuh"

template <int kOfRows>
struct WideShape {
  static constexpr int kThreads = 128, kWarps = kThreads / kWarp;
  static constexpr int kRows = kOfRows, kHalves = kRows / 16;  // times 16 rows
  static constexpr int kTile = 8 * kWarps / kHalves;           // tokens
  static constexpr int kSlices = kTile / 8;                    // of a tile's tokens
  static constexpr int kStride = kPaddedDim + 8;  // elements of a row in shared memory: no conflicts of banks
  static constexpr int kStage = kTile * kStride, kScaleTiles = 1;
  static constexpr int kShareStride = kTile + 8;
  static constexpr int kDimTiles = kPaddedDim / 16, kWarpDimTiles = (kDimTiles + kWarps - 1) / kWarps;
};

// The rows of a tile of an item, the first of which is the item's row `first`.
struct WideRows {
  const Attention& at;
  const Item& item;
  int first;

  INGOT_DEVICE int group() const { return at.heads / at.kv_heads; }
  INGOT_DEVICE int left() const { return item.count * group() - first; }
  // The position of a row's token; -1, which sees nothing, of none.
  INGOT_DEVICE int position(int row) const { return row < left() ? item.position + (first + row) / group() : -1; }
};

// What the warps of a block tell each other, and what each has to do.
template <int kRows>
struct alignas(16) WideWork {
  using Shape = WideShape<kRows>;
  Kv shares[kRows * Shape::kShareStride];  // the tile's weights
  float tops[Shape::kSlices][kRows];
  float weights[Shape::kSlices][kRows];  // at the end
  PrefillWork of;
  int first_row;
};

template <int kRows>
struct WideTile {
  using Shape = WideShape<kRows>;
  static constexpr int kHalves = Shape::kHalves, kStride = Shape::kStride;

  float sums[kHalves][Shape::kWarpDimTiles][2][4];  // rows lane / 4 and + 8 of each half; tiles of 16 dims, by eights
  float top[2 * kHalves];                           // of rows lane / 4 + 8 * i
  float weight[2];                                  // of the warp's tokens, for the two of these rows that it scores
  int positions[2];                                 // of these two rows' tokens
  float scale[2];                                   // of their scores
  float slope[2];

  INGOT_DEVICE static int slice() { return threadIdx.x / kWarp % Shape::kSlices; }
  INGOT_DEVICE static int side() { return threadIdx.x / kWarp / Shape::kSlices; }
  // The one of a lane's rows that it scores, of two; without an index that is not known when it is compiled.
  INGOT_DEVICE static float own(const float (&values)[2 * kHalves], int half) {
    return kHalves == 2 && side() ? values[2 * kHalves - 2 + half] : values[half];
  }

  INGOT_DEVICE void begin(const Attention& at, const WideRows& rows, int kv_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * side() + threadIdx.x % kWarp / 4 + 8 * half;
      positions[half] = rows.position(row);
      scale[half] = at.scale_at(max(positions[half], 0));
      slope[half] = at.slopes ? at.slopes[at.head(rows.first + row, kv_head)] : 0.f;
    }
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int d = 0; d < Shape::kWarpDimTiles; ++d) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[m][d][c / 4][c % 4] = 0.f;
      }
      top[2 * m] = top[2 * m + 1] = minus_infinity();
    }
    weight[0] = weight[1] = 0.f;
  }

  // The scores of the warp's 16 rows and 8 tokens. scales: of the tile's tokens, behind codes.
  INGOT_DEVICE static void multiply(float (&scores)[4], const Kv* queries, const Kv* keys, const float* scales) {
    const int lane = threadIdx.x % kWarp;
    const Kv* of_queries = queries + (16 * side() + (lane & 15)) * kStride + (lane >> 4) * 8;
    const Kv* of_keys = keys + (8 * slice() + (lane & 7)) * kStride;
    float more[4] = {};  // of every other 16 dims: a sum waits for the one before it
#pragma unroll 4
    for (int k = 0; k + 1 < Shape::kDimTiles; k += 2) {
      uint32_t a[4], b[4];
      load_matrices(b, of_keys + k * 16 + (lane >> 3) * 8);
      load_matrices(a, of_queries + k * 16);
      multiply_add<Kv>(scores, a, b[0], b[1]);
      load_matrices(a, of_queries + k * 16 + 16);
      multiply_add<Kv>(more, a, b[2], b[3]);
    }
    if constexpr (Shape::kDimTiles % 2 != 0) {
      constexpr int kLast = (Shape::kDimTiles - 1) * 16;
      uint32_t a[4], b[4];
      load_matrices(b, of_keys + kLast + ((lane >> 3) & 1) * 8);
      load_matrices(a, of_queries + kLast);
      multiply_add<Kv>(scores, a, b[0], b[1]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      scores[c] += more[c];
      if constexpr (kScaled) scores[c] *= scales[8 * slice() + 2 * (lane % 4) + c % 2];
    }
  }

  // Bends the scores; `first` is the position of the tile's first token. Tells the others the highest of each row.
  INGOT_DEVICE void bend(float (&scores)[4], WideWork<kRows>& work, const Attention& at, int first) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = positions[half], begin = at.first_visible(last);
      float highest = minus_infinity();
#pragma unroll
      for (int c = 2 * half; c < 2 * half + 2; ++c) {
        const int position = first + 8 * slice() + 2 * (lane % 4) + c % 2;
        float score = at.bent(scores[c] * scale[half]);
        if (at.slopes) score += at.bias(slope[half], last, position);
        scores[c] = position <= last && position >= begin ? score : minus_infinity();
        highest = fmaxf(highest, scores[c]);
      }
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      if (lane % 4 == 0) work.tops[slice()][16 * side() + lane / 4 + 8 * half] = highest;
    }
  }

  // Scores become weights under a running maximum, which all warps know; sums so far are rescaled. scales: of the
  // values of the tile's tokens, behind codes.
  INGOT_DEVICE void weigh(const float (&scores)[4], WideWork<kRows>& work, const float* scales) {
    const int lane = threadIdx.x % kWarp;
    float factors[2 * kHalves], bases[2 * kHalves];
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      float highest = top[i];
#pragma unroll
      for (int s = 0; s < Shape::kSlices; ++s) highest = fmaxf(highest, work.tops[s][lane / 4 + 8 * i]);
      bases[i] = highest == minus_infinity() ? 0.f : highest;  // nothing visible yet
      factors[i] = exp2f((top[i] - bases[i]) * kLog2e);
      top[i] = highest;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = own(bases, half);
      float low = exp2f((scores[2 * half] - base) * kLog2e), high = exp2f((scores[2 * half + 1] - base) * kLog2e);
      weight[half] = weight[half] * own(factors, half) + (low + high);
      if constexpr (kScaled) {
        const float* of_tokens = scales + 8 * slice() + 2 * (lane % 4);
        low = scaled_share(low, of_tokens[0]), high = scaled_share(high, of_tokens[1]);
      }
      const int to = (16 * side() + lane / 4 + 8 * half) * Shape::kShareStride + 8 * slice() + 2 * (lane % 4);
      *reinterpret_cast<uint32_t*>(work.shares + to) = pack_two<Kv>(low, high);
    }
    bool higher = false;
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) higher = higher || factors[i] != 1.f;
    if (!__any_sync(kAllLanes, higher)) return;  // as in most tiles: nothing would change
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int d = 0; d < Shape::kWarpDimTiles; ++d) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[m][d][c / 4][c % 4] *= factors[2 * m + c % 4 / 2];
      }
    }
  }

  // Adds the weighted values of the tile.
  INGOT_DEVICE void add(const WideWork<kRows>& work, const Kv* values) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int k = 0; k < Shape::kTile / 16; ++k) {
      uint32_t a[kHalves][4];
#pragma unroll
      for (int m = 0; m < kHalves; ++m) {
        load_matrices(a[m], work.shares + (16 * m + (lane & 15)) * Shape::kShareStride + k * 16 + (lane >> 4) * 8);
      }
#pragma unroll
      for (int d = 0; d < Shape::kWarpDimTiles; ++d) {
        const int dim_tile = Shape::kWarps * d + warp;
        if (dim_tile >= Shape::kDimTiles) break;  // all lanes of a warp
        uint32_t b[4];
        load_matrices_transposed(b, values + (k * 16 + (lane & 15)) * kStride + dim_tile * 16 + (lane >> 4) * 8);
#pragma unroll
        for (int m = 0; m < kHalves; ++m) {
          multiply_add<Kv>(sums[m][d][0], a[m], b[0], b[1]);
          multiply_add<Kv>(sums[m][d][1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // To y, or to the partials of `split`, as attention_combine takes them.
  INGOT_DEVICE void write(WideWork<kRows>& work, const Attention& at, const WideRows& rows, int64_t split) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, kv_head = work.of.kv_head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[half] += __shfl_xor_sync(kAllLanes, weight[half], 1);
      weight[half] += __shfl_xor_sync(kAllLanes, weight[half], 2);
      if (lane % 4 == 0) work.weights[slice()][16 * side() + lane / 4 + 8 * half] = weight[half];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {
      const int row = lane / 4 + 8 * i;
      if (row >= rows.left()) break;
      float whole = 0.f;
#pragma unroll
      for (int s = 0; s < Shape::kSlices; ++s) whole += work.weights[s][row];
      const int64_t partial = split * 16 + row;
      const int64_t to = at.place(rows.item, rows.first + row, kv_head);
      if (gridDim.z == 1) whole = at.with_sink(whole, top[i], at.head(rows.first + row, kv_head));
#pragma unroll
      for (int d = 0; d < Shape::kWarpDimTiles; ++d) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int dim = (Shape::kWarps * d + warp) * 16 + c / 2 * 8 + 2 * (lane % 4) + c % 2;
          const float sum = sums[i / 2][d][c / 2][i % 2 * 2 + c % 2];
          if (dim >= kHeadDim) continue;
          if (gridDim.z == 1) {
            store_activation(at.y, to * kHeadDim + dim, sum / whole, at.narrow);
          } else {
            at.partial[partial * kHeadDim + dim] = sum;
          }
        }
      }
      if (gridDim.z > 1 && warp == 0 && lane % 4 == 0)
        at.stats[2 * partial] = top[i], at.stats[2 * partial + 1] = whole;
    }
  }
};

// A tile of rows of an item: of `parts` of them that of number `part`, over the `blockIdx.z`-th part of its context.
template <int kRows>
INGOT_DEVICE void attend_wide(unsigned char* memory, WideWork<kRows>& work, const Attention& at, int number, int part,
                              int kv_head) {
  using Shape = WideShape<kRows>;
  if (threadIdx.x == 0) {
    const Item item = at.items[number];
    const WideRows rows{at, item, kRows * part};
    const int first = rows.position(0), last = rows.position(min(kRows, rows.left()) - 1);
    work.of.item = item, work.of.kv_head = kv_head, work.first_row = rows.first;
    work.of.table = at.tables + static_cast<int64_t>(item.sequence) * at.table_width;
    work.of.begin = at.first_visible(first), work.of.end = last + 1;
  }
  Kv* queries = reinterpret_cast<Kv*>(memory);
  Kv* keys = queries + kRows * Shape::kStride;
  Kv* values = keys + Shape::kStage;
  float* scales = reinterpret_cast<float*>(values + Shape::kStage);  // of keys, then of values
  if constexpr (kHeadDim < kPaddedDim) {                             // K and V lie one behind the other
    constexpr int kPad = kHeadDim < kPaddedDim ? kPaddedDim - kHeadDim : 1;
    for (int i = threadIdx.x; i < 2 * Shape::kTile * kPad; i += Shape::kThreads) {
      keys[i / kPad * Shape::kStride + kHeadDim + i % kPad] = Kv{0};
    }
  }
  __syncthreads();  // the work is known
  const WideRows rows{at, work.of.item, work.first_row};
  if (rows.left() <= 0) return;  // the item has fewer rows than others
  const Splits<Shape::kTile> splits(work.of.begin, work.of.end, gridDim.z);
  if (static_cast<int>(blockIdx.z) >= splits.used) return;  // nobody reads what it would write
  const int begin_tile = splits.first_tile + blockIdx.z * splits.share;
  const int end_tile = min(splits.first_tile + splits.tiles, begin_tile + splits.share);
  const Pages<Shape, false> pages{at, work.of, scales};
  pages.template load<true, false>(keys, values, begin_tile);
  copy_commit();

  constexpr int kPairs = kPaddedDim / 2;
#pragma unroll 8
  for (int i = threadIdx.x; i < kRows * kPairs; i += Shape::kThreads) {
    const int row = i / kPairs, dim = i % kPairs * 2;
    const bool there = row < rows.left();
    const float* from = at.q + at.place(rows.item, there ? rows.first + row : 0, kv_head) * kHeadDim;
    *reinterpret_cast<uint32_t*>(queries + row * Shape::kStride + dim) = two_queries(from, dim, there);
  }
  WideTile<kRows> tile;
  tile.begin(at, rows, kv_head);
#pragma unroll 1
  for (int index = begin_tile; index < end_tile; ++index) {
    float scores[4] = {};
    copy_wait<0>();
    __syncthreads();  // the keys are here, and everybody is done with the values before
    pages.template load<false, true>(keys, values, index);
    copy_commit();
    tile.multiply(scores, queries, keys, scales);
    tile.bend(scores, work, at, index * Shape::kTile);
    __syncthreads();  // everybody is done with the keys, and the highest scores are known
    if (index + 1 < end_tile) pages.template load<true, false>(keys, values, index + 1);
    copy_commit();
    tile.weigh(scores, work, scales + Shape::kTile);
    copy_wait<1>();
    __syncthreads();  // the values and their weights are here
    tile.add(work, values);
  }
  copy_wait<0>();
  const int64_t split = (static_cast<int64_t>(number) * at.kv_heads + kv_head) * gridDim.z + blockIdx.z;
  tile.write(work, at, rows, split);
}
