// Matrix products with their epilogues: y[m][n] = epilogue(x[m][k] . weight[n][k]).
//
// The bits of a row do not depend on how many rows there are:
//   K is cut into slabs of 32, and the slabs into kParts parts. A part is added up from zero, slab by slab; the parts
//   are added in order. Every kernel here does it so. In a slab, lane i holds k = 8 * (i % 4) ... + 7 of row i / 4, the
//   16 bytes as they lie in memory. Two mma of 16 k take them, and x alike: so the matrix unit pairs what belongs
//   together, in places that are the same in every kernel.
// A warp computes a pair of 16 rows of the weight: neighbours, or those of gate and up that belong together.
#include "epilogue.cuh"
#include "matrix_units.cuh"

constexpr int kProductThreads = 256;

// rows: points to the rows of this step. n: rows of the weight, gate and up together.
#define INGOT_PRODUCT_PARAMETERS                                                                                    \
  void *y, const Weight *x, const Weight *weight, const float *bias, const float *residual, const int *rows, int n, \
      int k, int gated, int kind, int narrow
#define INGOT_PRODUCT                                                                           \
  Product {                                                                                     \
    x, weight, *rows, n, k, gated ? n / 2 : 0, Epilogue {                                       \
      y, bias, gated &&bias ? bias + n / 2 : nullptr, residual, gated ? n / 2 : n, kind, narrow \
    }                                                                                           \
  }

struct Product {
  const Weight* x;
  const Weight* weight;
  int rows;
  int n;
  int k;
  int half;  // of a gated product, else 0
  Epilogue to;
};

#ifndef INGOT_WEIGHT_IS_F32

constexpr int kSlab = 32;
constexpr int kParts = 8;
constexpr int kPairRows = 32;  // of the weight, in a warp

struct Eight {
  uint32_t words[4];  // eight neighbours of a row
};

INGOT_DEVICE int part_begin(int part, int slabs) {
  return static_cast<int>(static_cast<int64_t>(part) * slabs / kParts);
}

// k, ... k + 7 of a row; zeros behind its end. kWide: rows are whole multiples of 16 bytes.
template <bool kWide>
INGOT_DEVICE Eight load_eight(const Weight* row, int k, int end, bool valid) {
  Eight found{{0, 0, 0, 0}};
  if (!valid || k >= end) return found;
  if constexpr (kWide) {
    return *reinterpret_cast<const Eight*>(__builtin_assume_aligned(row + k, 16));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (k + i < end) found.words[i / 2] |= static_cast<uint32_t>(row[k + i].bits) << (16 * (i % 2));
    }
    return found;
  }
}

// Row `i` of the 32 of a pair that begins with output column `first`: its row of the weight, or -1.
INGOT_DEVICE int weight_row(const Product& p, int first, int i) {
  if (!p.half) return first + i < p.n ? first + i : -1;
  const int col = first + i % 16;
  return col >= p.half ? -1 : i < 16 ? col : p.half + col;
}

// One slab: the rows lane / 4, + 8, + 16, + 24 of a pair, and row lane / 4 of every eight of x.
template <int kTiles>
INGOT_DEVICE void multiply_slab(float (&sum)[2][kTiles][4], const Eight (&a)[4], const Eight (&b)[kTiles]) {
#pragma unroll
  for (int step = 0; step < 4; step += 2) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const Eight &upper = a[2 * pair], &lower = a[2 * pair + 1];
      const uint32_t left[4] = {upper.words[step], lower.words[step], upper.words[step + 1], lower.words[step + 1]};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply_add<Weight>(sum[pair][tile], left, b[tile].words[step], b[tile].words[step + 1]);
      }
    }
  }
}

// Few rows: 8 * kTiles at most. Each warp computes a part of K for the block's pair, straight from global memory, with
// kAhead slabs under way.
template <int kTiles, bool kWide>
INGOT_DEVICE void few_rows(const Product& p, float* parts) {
  constexpr int kAhead = kWide ? 4 : 1;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.x * (p.half ? 16 : kPairRows), slabs = (p.k + kSlab - 1) / kSlab;
  const int begin = part_begin(warp, slabs), end = part_begin(warp + 1, slabs), within = 8 * (lane % 4);
  const Weight* left[4];
  bool valid[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = weight_row(p, first, lane / 4 + 8 * i);
    valid[i] = row >= 0;
    left[i] = p.weight + static_cast<int64_t>(valid[i] ? row : 0) * p.k;
  }
  Eight a[kAhead][4], b[kAhead][kTiles];
  const auto load = [&](int slot, int slab) {
    const int at = slab * kSlab + within;
#pragma unroll
    for (int i = 0; i < 4; ++i) a[slot][i] = load_eight<kWide>(left[i], at, p.k, valid[i]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = 8 * tile + lane / 4;
      b[slot][tile] = load_eight<kWide>(p.x + static_cast<int64_t>(row) * p.k, at, p.k, row < p.rows);
    }
  };
  float sum[2][kTiles][4] = {};
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (begin + slot < end) load(slot, begin + slot);
  }
  for (int slab = begin; slab < end; slab += kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      if (slab + slot >= end) break;
      multiply_slab<kTiles>(sum, a[slot], b[slot]);
      if (slab + slot + kAhead < end) load(slot, slab + slot + kAhead);
    }
  }
  // parts[warp][pair][tile][lane][4]
  constexpr int kHalf = kTiles * kWarp * 4;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        parts[(2 * warp + pair) * kHalf + (tile * kWarp + lane) * 4 + c] = sum[pair][tile][c];
      }
    }
  }
  __syncthreads();
  const int i = threadIdx.x % 16, row = threadIdx.x / 16;  // of the pair's halves, of x
  if (row >= 8 * kTiles || row >= p.rows) return;
  const int place = (row / 8 * kWarp + i % 8 * 4 + row % 8 / 2) * 4 + i / 8 * 2 + row % 2;
  float total[2] = {0.f, 0.f};
  for (int part = 0; part < kParts; ++part) {
    total[0] += parts[2 * part * kHalf + place];
    total[1] += parts[(2 * part + 1) * kHalf + place];
  }
  if (p.half) {
    if (first + i < p.half) p.to.write_gated(row, first + i, total[0], total[1]);
  } else {
    if (first + i < p.n) p.to.write(row, first + i, total[0]);
    if (first + 16 + i < p.n) p.to.write(row, first + 16 + i, total[1]);
  }
}

template <int kTiles>
INGOT_DEVICE void few_rows(const Product& p, float* parts) {
  if (p.k % 8 == 0) {
    few_rows<kTiles, true>(p, parts);
  } else {
    few_rows<kTiles, false>(p, parts);
  }
}

// Grid: pairs
INGOT_KERNEL(kProductThreads)
product_8(INGOT_PRODUCT_PARAMETERS) {
  __shared__ float parts[kParts * 2 * kWarp * 4];
  few_rows<1>(INGOT_PRODUCT, parts);
}
INGOT_KERNEL(kProductThreads)
product_16(INGOT_PRODUCT_PARAMETERS) {
  __shared__ float parts[kParts * 2 * 2 * kWarp * 4];
  few_rows<2>(INGOT_PRODUCT, parts);
}

// Many rows: a block computes 16 * kTiles of them and four pairs of the weight, by eight warps of one pair and half of
// the rows each. Slabs of both pass through shared memory, kStages of them at a time.
constexpr int kStages = 4;
constexpr int kBlockPairs = 4;
constexpr int kWeightRows = kBlockPairs * kPairRows;

template <int kTiles, bool kWide>
INGOT_DEVICE void many_rows(const Product& p, Eight* stages) {
  constexpr int kRows = 16 * kTiles, kLines = kWeightRows + kRows;  // lines of 64 bytes in a stage: the weight's, x's
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int per_pair = p.half ? 16 : kPairRows, pair = warp % kBlockPairs;
  const int first = blockIdx.y * kBlockPairs * per_pair, top = blockIdx.x * kRows;
  const int slabs = (p.k + kSlab - 1) / kSlab;
  constexpr int kEach = kLines * 4 / kProductThreads;  // pieces of 16 bytes that a thread copies, of as many lines
  const Weight* from[kEach];
  bool valid[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int line = (threadIdx.x + i * kProductThreads) / 4, x_row = top + line - kWeightRows;
    const bool is_weight = line < kWeightRows;
    const int row = is_weight ? weight_row(p, first + line / kPairRows * per_pair, line % kPairRows) : x_row;
    valid[i] = is_weight ? row >= 0 : row < p.rows;
    from[i] = (is_weight ? p.weight : p.x) + static_cast<int64_t>(valid[i] ? row : 0) * p.k;
  }
  const auto load = [&](int slab) {
    Eight* to = stages + slab % kStages * kLines * 4 + threadIdx.x;
    const int column = slab * kSlab + threadIdx.x % 4 * 8;
    const int inside = column < p.k ? column : 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (kWide) {
        copy_async(to + i * kProductThreads, from[i] + inside, valid[i] && column < p.k);
      } else {
        to[i * kProductThreads] = load_eight<false>(from[i], column, p.k, valid[i]);
      }
    }
    copy_commit();
  };
  for (int slab = 0; slab < kStages - 1; ++slab) {
    if (slab < slabs) {
      load(slab);
    } else {
      copy_commit();
    }
  }
  float sum[2][kTiles][4] = {}, total[2][kTiles][4] = {};
  int part = 1, boundary = 0;  // where the part ends, in slabs
  while (part <= kParts && (boundary = part_begin(part, slabs)) == 0) ++part;
  for (int slab = 0; slab < slabs; ++slab) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this slab is there for all, and nobody reads the one before it any more
    if (slab + kStages - 1 < slabs) {
      load(slab + kStages - 1);
    } else {
      copy_commit();
    }
    const Eight* stage = stages + slab % kStages * kLines * 4;
    const Eight* left = stage + (pair * kPairRows + lane / 4) * 4 + lane % 4;
    const Eight* right = stage + (kWeightRows + warp / kBlockPairs * 8 * kTiles + lane / 4) * 4 + lane % 4;
    Eight a[4], b[kTiles];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = left[8 * 4 * i];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) b[tile] = right[8 * 4 * tile];
    multiply_slab<kTiles>(sum, a, b);
    if (slab + 1 < boundary) continue;
    while (part <= kParts && (boundary = part_begin(part, slabs)) <= slab + 1) ++part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          total[half][tile][c] += sum[half][tile][c];
          sum[half][tile][c] = 0.f;
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = top + (warp / kBlockPairs * kTiles + tile) * 8 + lane % 4 * 2 + c % 2;
      const int col = first + pair * per_pair + lane / 4 + c / 2 * 8;
      if (row >= p.rows) continue;
      if (p.half) {
        if (col < p.half) p.to.write_gated(row, col, total[0][tile][c], total[1][tile][c]);
      } else {
        if (col < p.n) p.to.write(row, col, total[0][tile][c]);
        if (col + 16 < p.n) p.to.write(row, col + 16, total[1][tile][c]);
      }
    }
  }
}

template <int kTiles>
INGOT_DEVICE void many_rows(const Product& p, unsigned char* shared) {
  Eight* stages = reinterpret_cast<Eight*>(shared);
  if (p.k % 8 == 0) {
    many_rows<kTiles, true>(p, stages);
  } else {
    many_rows<kTiles, false>(p, stages);
  }
}

// Grid: (tiles of x, tiles of four pairs)
INGOT_KERNEL(kProductThreads)
product_64(INGOT_PRODUCT_PARAMETERS) {
  INGOT_SHARED(shared);
  many_rows<4>(INGOT_PRODUCT, shared);
}
INGOT_KERNEL(kProductThreads)
product_128(INGOT_PRODUCT_PARAMETERS) {
  INGOT_SHARED(shared);
  many_rows<8>(INGOT_PRODUCT, shared);
}

#else

// Float32: a thread computes four rows of one output column, k ascending. Grid: (tiles of 16 rows, tiles of 64 columns)
INGOT_KERNEL(kProductThreads)
product_f32(INGOT_PRODUCT_PARAMETERS) {
  constexpr int kColumns = 64, kRows = 16, kDepth = 16, kEach = kRows * kColumns / kProductThreads;
  __shared__ float left[2][kDepth][kColumns + 1];  // of gate and up, if there are both
  __shared__ float right[kDepth][kRows + 1];
  const Product p = INGOT_PRODUCT;
  const int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const int first = blockIdx.y * kColumns, top = blockIdx.x * kRows, cols = p.to.cols;
  float sum[2][kEach] = {};
  for (int begin = 0; begin < p.k; begin += kDepth) {
    for (int at = threadIdx.x; at < kColumns * kDepth; at += kProductThreads) {
      const int depth = at % kDepth, row = first + at / kDepth, k_at = begin + depth;
      const bool valid = row < cols && k_at < p.k;
      left[0][depth][at / kDepth] = valid ? p.weight[static_cast<int64_t>(row) * p.k + k_at].value : 0.f;
      if (p.half)
        left[1][depth][at / kDepth] = valid ? p.weight[static_cast<int64_t>(p.half + row) * p.k + k_at].value : 0.f;
    }
    for (int at = threadIdx.x; at < kRows * kDepth; at += kProductThreads) {
      const int depth = at % kDepth, row = top + at / kDepth, k_at = begin + depth;
      const bool valid = row < p.rows && k_at < p.k;
      right[depth][at / kDepth] = valid ? p.x[static_cast<int64_t>(row) * p.k + k_at].value : 0.f;
    }
    __syncthreads();
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float factor = right[depth][group * kEach + i];
        sum[0][i] += left[0][depth][column] * factor;
        if (p.half) sum[1][i] += left[1][depth][column] * factor;
      }
    }
    __syncthreads();
  }
  if (first + column >= cols) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = top + group * kEach + i;
    if (row >= p.rows) return;
    if (p.half) {
      p.to.write_gated(row, first + column, sum[0][i], sum[1][i]);
    } else {
      p.to.write(row, first + column, sum[0][i]);
    }
  }
}

#endif
