// Multi-head latent attention with the products of keys and values absorbed: every head reads the same rows, whose
// first kRank numbers are the values too.
//
//   cache block [tokens_per_block][kHeadDim]: kRank numbers, then the rotated key that all heads share
//
// The rows of a tile are the heads of a token, and, where these are few, of its neighbours: 32 of them read a row of
// the cache together. Grid: (items, tiles of 32 rows, splits).
#include "paged_attention.cuh"

constexpr int kRank = INGOT_LATENT, kLatentThreads = 128, kLatentRows = 32;  // LATENT_ROWS in shapes.py
constexpr int kHeadWarps = kLatentThreads / kWarp;

// A row of the cache from its latent, and queries. A query has `columns`, of which the last ones, as many as a row has
// behind its latent, are rotated; all grow with the position. q may be the input. Grid: (tokens, 1 for the row, then
// heads / 4)
INGOT_KERNEL(kLatentThreads)
write_latent(float* q, Kv* rows, const float* input, const float* latent, const float* cos_sin, const float* norm,
             const int* positions, const int* sequences, const int* tables, int table_width, int heads, int columns,
             int rotary_dim, int interleaved, float eps, float growth, int growth_every) {
  wait_for_previous();
  __shared__ float scratch[kWarp];
  constexpr int kTail = kHeadDim - kRank;
  const int64_t token = blockIdx.x;
  const int position = positions[token], half = rotary_dim / 2, lane = threadIdx.x % kWarp;
  const float* cosines = cos_sin + token * rotary_dim;
  // Pair i of a tail, each number with what becomes of it.
  const auto turn = [&](const float* from, int i, auto store) {
    const int first = interleaved ? 2 * i : i, second = interleaved ? first + 1 : i + half;
    const float x = from[first], y = from[second], cosine = cosines[i], sine = cosines[half + i];
    store(first, x * cosine - y * sine), store(second, y * cosine + x * sine);
  };
  if (blockIdx.y == 0) {
    const int block = tables[static_cast<int64_t>(sequences[token]) * table_width + position / kBlockTokens];
    Kv* to = rows + (static_cast<int64_t>(block) * kBlockTokens + position % kBlockTokens) * kHeadDim;
    const float* from = latent + token * kHeadDim;
    float squares = 0.f;
    for (int i = threadIdx.x; i < kRank; i += kLatentThreads) squares += from[i] * from[i];
    const float factor = 1.f / sqrtf(block_sum_once(squares, scratch) / kRank + eps);
    for (int i = threadIdx.x; i < kRank; i += kLatentThreads) to[i] = from_float<Kv>(from[i] * factor * norm[i]);
    for (int i = threadIdx.x; i < half; i += kLatentThreads) {
      turn(from + kRank, i, [to](int at, float value) { to[kRank + at] = from_float<Kv>(value); });
    }
    for (int i = rotary_dim + threadIdx.x; i < kTail; i += kLatentThreads) {
      to[kRank + i] = from_float<Kv>(from[kRank + i]);
    }
    return;
  }
  const int head = (blockIdx.y - 1) * kHeadWarps + threadIdx.x / kWarp;
  if (head >= heads) return;
  const float factor = 1.f + growth * logf(1.f + position / growth_every);
  const float* from = input + (token * heads + head) * columns;
  float* to = q + (token * heads + head) * columns;
  const int tail = columns - kTail;
  if (from != to || growth > 0.f) {
    for (int i = lane; i < tail; i += kWarp) to[i] = from[i] * factor;
    for (int i = tail + rotary_dim + lane; i < columns; i += kWarp) to[i] = from[i] * factor;
  }
  for (int i = lane; i < half; i += kWarp) {
    turn(from + tail, i, [to, tail, factor](int at, float value) { to[tail + at] = value * factor; });
  }
}

// The rows of a tile: a head of a token each.
struct LatentRows {
  Item item;
  int heads;
  int first;

  INGOT_DEVICE bool there(int row) const { return first + row < item.count * heads; }
  // The position of its token; -1, which sees nothing, of none.
  INGOT_DEVICE int position(int row) const { return there(row) ? item.position + (first + row) / heads : -1; }
  // In q and y, in heads.
  INGOT_DEVICE int64_t place(int row) const { return static_cast<int64_t>(item.token) * heads + first + row; }
  // Behind the last token that a row sees.
  INGOT_DEVICE int end() const { return position(min(kLatentRows, item.count * heads - first) - 1) + 1; }
};

#define INGOT_LATENT_PARAMETERS                                                                                 \
  void *y, const float *q, const Kv *cache, const Item *items, const int *tables, float *partial, float *stats, \
      int table_width, int heads, float scale, int narrow

#ifndef INGOT_KV_IS_F32
#include "matrix_units.cuh"

constexpr int kLatentTile = 32;  // tokens
constexpr int kLatentStride = kPaddedDim + 8, kShareStride = kLatentTile + 8;
constexpr int kDimTiles = (kRank + 15) / 16, kWarpDimTiles = (kDimTiles + kHeadWarps - 1) / kHeadWarps;

// Rows of tokens begin .. end - 1 of a tile; others become zeros.
INGOT_DEVICE void load_latents(Kv* to, const Kv* cache, const int* table, int begin, int end) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int row = warp; row < kLatentTile; row += kHeadWarps) {
    const int position = begin + row;
    const bool there = position < end;
    const int64_t block = there ? table[position / kBlockTokens] : 0;
    const Kv* from = cache + (block * kBlockTokens + (there ? position % kBlockTokens : 0)) * kHeadDim;
    if constexpr (kHeadDim % 8 == 0) {
      for (int chunk = lane; chunk < kHeadDim / 8; chunk += kWarp) {
        copy_async(to + row * kLatentStride + chunk * 8, from + chunk * 8, there);
      }
    } else {
      for (int i = lane; i < kHeadDim; i += kWarp) to[row * kLatentStride + i] = there ? from[i] : Kv{0};
    }
  }
}

// What the warps of a block tell each other. A warp computes the scores of 16 rows and of 16 tokens of a tile; then all
// rows' sums of a quarter of the dims.
struct alignas(16) LatentWork {
  Kv shares[kLatentRows * kShareStride];  // the tile's weights
  float tops[2][kLatentRows];             // of the two halves of its tokens
  float weights[2][kLatentRows];          // at the end
};

struct LatentTile {
  float sums[2][kWarpDimTiles][2][4];  // 16 rows each; tiles of 16 dims, eight by eight
  float top[4];                        // of rows lane / 4, + 8, + 16, + 24
  float weight[2];                     // of the warp's tokens, for two of these rows

  INGOT_DEVICE void clear() {
#pragma unroll
    for (int d = 0; d < kWarpDimTiles; ++d) {
#pragma unroll
      for (int c = 0; c < 8; ++c) sums[0][d][c / 4][c % 4] = sums[1][d][c / 4][c % 4] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = minus_infinity();
    weight[0] = weight[1] = 0.f;
  }

  INGOT_DEVICE void attend(const Kv* queries, const Kv* latents, LatentWork& work, const LatentRows& rows, int first,
                           float scale) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, side = warp % 2, tokens = warp / 2;
    float scores[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < kPaddedDim / 16; ++k) {
      uint32_t a[4], b[4];
      load_matrices(a, queries + (16 * side + (lane & 15)) * kLatentStride + k * 16 + (lane >> 4) * 8);
      const int token = 16 * tokens + (lane & 7) + (lane >> 4) * 8;
      load_matrices(b, latents + token * kLatentStride + k * 16 + ((lane >> 3) & 1) * 8);
      multiply_add<Kv>(scores[0], a, b[0], b[1]);
      multiply_add<Kv>(scores[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * side + lane / 4 + 8 * half, last = rows.position(row);
      float highest = minus_infinity();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          const int position = first + 16 * tokens + 8 * n + 2 * (lane % 4) + c % 2;
          scores[n][c] = position <= last ? scores[n][c] * scale : minus_infinity();
          highest = fmaxf(highest, scores[n][c]);
        }
      }
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
      if (lane % 4 == 0) work.tops[tokens][row] = highest;
    }
    __syncthreads();
    float factors[4], bases[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * i;
      const float highest = fmaxf(top[i], fmaxf(work.tops[0][row], work.tops[1][row]));
      bases[i] = highest == minus_infinity() ? 0.f : highest;  // nothing visible yet
      factors[i] = exp2f((top[i] - bases[i]) * kLog2e);
      top[i] = highest;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = side ? bases[2 + half] : bases[half];
      weight[half] *= side ? factors[2 + half] : factors[half];
      float share[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        for (int c = 0; c < 2; ++c) {
          share[2 * n + c] = exp2f((scores[n][2 * half + c] - base) * kLog2e);
          weight[half] += share[2 * n + c];
        }
        const int at = (16 * side + lane / 4 + 8 * half) * kShareStride + 16 * tokens + 8 * n + 2 * (lane % 4);
        *reinterpret_cast<uint32_t*>(work.shares + at) = pack_two<Kv>(share[2 * n], share[2 * n + 1]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int d = 0; d < kWarpDimTiles; ++d) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[m][d][c / 4][c % 4] *= factors[2 * m + c % 4 / 2];
      }
    }
#pragma unroll
    for (int k = 0; k < kLatentTile / 16; ++k) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(a[m], work.shares + (16 * m + (lane & 15)) * kShareStride + k * 16 + (lane >> 4) * 8);
      }
#pragma unroll
      for (int d = 0; d < kWarpDimTiles; ++d) {
        const int dim_tile = kHeadWarps * d + warp;
        if (dim_tile >= kDimTiles) break;  // all lanes of a warp
        uint32_t b[4];
        load_matrices_transposed(b, latents + (k * 16 + (lane & 15)) * kLatentStride + dim_tile * 16 + (lane >> 4) * 8);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<Kv>(sums[m][d][0], a[m], b[0], b[1]);
          multiply_add<Kv>(sums[m][d][1], a[m], b[2], b[3]);
        }
      }
    }
  }
};

// A split's sums go to y where there is one split; else partial [items][row tiles][splits][32][kRank] and stats
// [...][32] {top, weight}.
INGOT_KERNEL(kLatentThreads) latent_attention(INGOT_LATENT_PARAMETERS) {
  wait_for_previous();
  INGOT_SHARED(memory);
  __shared__ LatentWork work;
  const LatentRows rows{items[blockIdx.x], heads, static_cast<int>(blockIdx.y) * kLatentRows};
  if (!rows.there(0)) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Splits<kLatentTile> splits(0, rows.end(), gridDim.z);
  if (static_cast<int>(blockIdx.z) >= splits.used) return;  // nobody reads what it would write
  const int begin_tile = blockIdx.z * splits.share, end_tile = min(splits.tiles, begin_tile + splits.share);
  Kv* queries = reinterpret_cast<Kv*>(memory);
  Kv* latents = queries + kLatentRows * kLatentStride;
  for (int i = threadIdx.x; i < kLatentRows * kPaddedDim; i += kLatentThreads) {
    const int row = i / kPaddedDim, dim = i % kPaddedDim;
    const bool valid = dim < kHeadDim && rows.there(row);
    queries[row * kLatentStride + dim] = from_float<Kv>(valid ? q[rows.place(row) * kHeadDim + dim] : 0.f);
  }
  if constexpr (kHeadDim < kPaddedDim) {
    constexpr int kPad = kHeadDim < kPaddedDim ? kPaddedDim - kHeadDim : 1;
    for (int i = threadIdx.x; i < kLatentTile * kPad; i += kLatentThreads) {
      latents[i / kPad * kLatentStride + kHeadDim + i % kPad] = Kv{0};
    }
  }
  LatentTile tile;
  tile.clear();
  const int* table = tables + static_cast<int64_t>(rows.item.sequence) * table_width;
  for (int index = begin_tile; index < end_tile; ++index) {
    load_latents(latents, cache, table, index * kLatentTile, rows.end());
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // the tile is here
    tile.attend(queries, latents, work, rows, index * kLatentTile, scale);
    __syncthreads();  // nobody reads it any more
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    tile.weight[half] += __shfl_xor_sync(kAllLanes, tile.weight[half], 1);
    tile.weight[half] += __shfl_xor_sync(kAllLanes, tile.weight[half], 2);
    if (lane % 4 == 0) work.weights[warp / 2][warp % 2 * 16 + lane / 4 + 8 * half] = tile.weight[half];
  }
  __syncthreads();
  const int64_t split = (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * i;
    if (!rows.there(row)) break;
    const float weight = work.weights[0][row] + work.weights[1][row];
    const int64_t place = gridDim.z == 1 ? rows.place(row) : split * kLatentRows + row;
#pragma unroll
    for (int d = 0; d < kWarpDimTiles; ++d) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int dim = (kHeadWarps * d + warp) * 16 + c / 2 * 8 + 2 * (lane % 4) + c % 2;
        const float sum = tile.sums[i / 2][d][c / 2][i % 2 * 2 + c % 2];
        if (dim >= kRank) continue;
        if (gridDim.z == 1) {
          store_activation(y, place * kRank + dim, sum / weight, narrow);
        } else {
          partial[place * kRank + dim] = sum;
        }
      }
    }
    if (gridDim.z > 1 && warp == 0 && lane % 4 == 0) stats[2 * place] = tile.top[i], stats[2 * place + 1] = weight;
  }
}

// y = the splits of latent_attention, weighted; the blocks of a tile share its elements.
INGOT_KERNEL(kLatentThreads)
latent_combine(void* y, const Item* items, const float* partial, const float* stats, int heads, int narrow) {
  constexpr int kMostSplits = 64;  // MAX_SPLITS in shapes.py
  __shared__ float factors[kLatentRows][kMostSplits], weights[kLatentRows];
  let_next_begin();
  wait_for_previous();
  const LatentRows rows{items[blockIdx.x], heads, static_cast<int>(blockIdx.y) * kLatentRows};
  if (!rows.there(0)) return;
  const int used = Splits<kLatentTile>(0, rows.end(), gridDim.z).used;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y) * gridDim.z;
  const int count = min(kLatentRows, rows.item.count * heads - rows.first);
  if (static_cast<int>(threadIdx.x) < count) {  // a thread for each row
    const float* from = stats + (first * kLatentRows + threadIdx.x) * 2;
    float top = minus_infinity(), weight = 0.f;
    for (int split = 0; split < used; ++split) top = fmaxf(top, from[split * kLatentRows * 2]);
    for (int split = 0; split < used; ++split) {
      const float factor = exp2f((from[split * kLatentRows * 2] - top) * kLog2e);
      factors[threadIdx.x][split] = factor, weight += from[split * kLatentRows * 2 + 1] * factor;
    }
    weights[threadIdx.x] = weight;
  }
  __syncthreads();
  for (int i = blockIdx.z * kLatentThreads + threadIdx.x; i < count * kRank; i += gridDim.z * kLatentThreads) {
    const int row = i / kRank, dim = i % kRank;
    const float* from = partial + (first * kLatentRows + row) * kRank + dim;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < used; ++split) {
      sum += from[static_cast<int64_t>(split) * kLatentRows * kRank] * factors[row][split];
    }
    store_activation(y, rows.place(row) * kRank + dim, sum / weights[row], narrow);
  }
}

#else  // a float32 cache: for comparisons, not for speed

// A warp takes every fourth row, token by token. Grid: (items, tiles of 32 rows)
INGOT_KERNEL(kLatentThreads) latent_rows(INGOT_LATENT_PARAMETERS) {
  wait_for_previous();
  constexpr int kPerLane = (kHeadDim + kWarp - 1) / kWarp;
  const LatentRows rows{items[blockIdx.x], heads, static_cast<int>(blockIdx.y) * kLatentRows};
  const int* table = tables + static_cast<int64_t>(rows.item.sequence) * table_width;
  const int lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < kLatentRows && rows.there(row); row += kHeadWarps) {
    const int64_t place = rows.place(row);
    float query[kPerLane], sums[kPerLane], top = minus_infinity(), weight = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      query[i] = i * kWarp + lane < kHeadDim ? q[place * kHeadDim + i * kWarp + lane] : 0.f;
      sums[i] = 0.f;
    }
    for (int position = 0; position <= rows.position(row); ++position) {
      const int64_t slot =
          static_cast<int64_t>(table[position / kBlockTokens]) * kBlockTokens + position % kBlockTokens;
      float numbers[kPerLane], score = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int dim = i * kWarp + lane;
        numbers[i] = dim < kHeadDim ? to_float(cache[slot * kHeadDim + dim]) : 0.f;
        score += query[i] * numbers[i];
      }
      score = warp_sum(score) * scale;
      const float highest = fmaxf(top, score);
      const float factor = expf(top - highest), share = expf(score - highest);
      top = highest;
      weight = weight * factor + share;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[i] = sums[i] * factor + share * numbers[i];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int dim = i * kWarp + lane;
      if (dim < kRank) store_activation(y, place * kRank + dim, sums[i] / weight, narrow);
    }
  }
}
#endif
