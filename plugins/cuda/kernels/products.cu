// Matrix products with their epilogues: y[m][n] = epilogue(x[m][k] . weight[n][k]).
//
// The bits of a row do not depend on how many rows there are:
//   K is cut into slabs of 32, and the slabs into kParts parts. A part is added up from zero, slab by slab; the parts
//   are added in order. Every kernel here does it so. In a slab, lane i holds k = 8 * (i % 4) ... + 7 of row i / 4, the
//   16 bytes as they lie in memory. Two mma of 16 k take them, and x alike: so the matrix unit pairs what belongs
//   together, in places that are the same in every kernel.
// A warp computes a pair of 16 rows of the weight: neighbours, or those of gate and up that belong together.
#include "code_formats.cuh"
#include "epilogue.cuh"
#include "experts.cuh"
#include "unit_strips.cuh"

constexpr int kProductThreads = 256;  // of a block that computes many rows

// rows: points to the rows of this step. n: rows of the weight, gate and up together.
#define INGOT_PRODUCT_PARAMETERS                                                                                  \
  void *y, const Weight *x, const void *weight, const float *bias, const float *residual, const int *rows, int n, \
      int k, int gated, int kind, int narrow, int group
#define INGOT_PRODUCT                                                                           \
  Product {                                                                                     \
    x, weight, *rows, {n, k, gated ? n / 2 : 0, group}, Epilogue {                              \
      y, bias, gated &&bias ? bias + n / 2 : nullptr, residual, gated ? n / 2 : n, kind, narrow \
    }                                                                                           \
  }

struct Product {
  const Weight* x;
  const void* weight;
  int rows;
  Sizes of;
  Epilogue to;
  const int* pairs;  // of experts: the places of this tile's rows in y; else null, for all rows in order
  int each;          // places in y that read the same row of x, one after the other
  int ld;            // of products of heads: from a row of x to the next; else 0, for k

  // Row `row` of x.
  INGOT_DEVICE const Weight* input(int row) const { return x + static_cast<int64_t>(source(row)) * (ld ? ld : of.k); }

  INGOT_DEVICE int source(int row) const { return pairs ? pairs[row] / each : row; }
  INGOT_DEVICE int target(int row) const { return pairs ? pairs[row] : row; }
  // The first row of a tile: experts have the rows of theirs alone.
  INGOT_DEVICE int first(int tile) const { return pairs ? 0 : static_cast<int>(blockIdx.x) * tile; }
};

#ifdef INGOT_EXPERTS

#define INGOT_EXPERT_PARAMETERS                                                                               \
  void *y, const Weight *x, const void *weight, const float *bias, const ExpertTile *tiles, const int *pairs, \
      int each, int n, int k, int gated, int kind, int narrow, int group, float limit, float alpha
#define INGOT_EXPERT_ARGUMENTS y, x, weight, bias, pairs, each, n, k, gated, kind, narrow, group, limit, alpha

// The product of a tile with its expert, whose weight has so many bytes.
INGOT_DEVICE Product of_expert(const ExpertTile& tile, int64_t bytes, void* y, const Weight* x, const void* weight,
                               const float* bias, const int* pairs, int each, int n, int k, int gated, int kind,
                               int narrow, int group, float limit, float alpha) {
  const float* own = bias ? bias + static_cast<int64_t>(tile.expert) * n : nullptr;
  const float* up = own && gated ? own + n / 2 : nullptr;
  return {x,
          static_cast<const unsigned char*>(weight) + tile.expert * bytes,
          tile.count,
          {n, k, gated ? n / 2 : 0, group},
          {y, own, up, nullptr, gated ? n / 2 : n, kind, narrow, limit, alpha},
          pairs + tile.first,
          each};
}

#endif

#ifdef INGOT_LATENT

#define INGOT_HEAD_PARAMETERS                                                                                     \
  void *y, const Weight *x, const float *kept_from, const void *weight, const int *rows, int heads, int n, int k, \
      int kept, int narrow
#define INGOT_HEAD_ARGUMENTS y, x, weight, *rows, heads, n, k, kept, narrow

// The product of head blockIdx.z: y[r, h] = [x[r, h, :k] . weight[h] | kept_from[r, h, k:]].
INGOT_DEVICE Product of_head(void* y, const Weight* x, const void* weight, int rows, int heads, int n, int k, int kept,
                             int narrow) {
  const int64_t head = blockIdx.z, first = head * (n + kept);
  void* own = narrow ? static_cast<void*>(static_cast<Weight*>(y) + first) : static_cast<float*>(y) + first;
  return {x + head * (k + kept),
          static_cast<const Weight*>(weight) + head * n * k,
          rows,
          {n, k, 0, 0},
          {own, nullptr, nullptr, nullptr, heads * (n + kept), kNone, narrow, 0.f, 0.f},
          nullptr,
          0,
          heads * (k + kept)};
}

// The columns behind a product, of `count` rows from `top` on.
INGOT_DEVICE void copy_kept(int top, int count, void* y, const float* from, int heads, int n, int k, int kept,
                            int narrow) {
  const int head = blockIdx.z;
  for (int i = threadIdx.x; i < count * kept; i += kProductThreads) {
    const int64_t row = (top + i / kept) * static_cast<int64_t>(heads) + head;
    const int column = i % kept;
    store_activation(y, row * (n + kept) + n + column, from[row * (k + kept) + k + column], narrow);
  }
}

#endif

#ifndef INGOT_WEIGHT_IS_F32

constexpr int kParts = 8;

INGOT_DEVICE int part_begin(int part, int slabs) {
  return static_cast<int>(static_cast<int64_t>(part) * slabs / kParts);
}

// One slab: the rows lane / 4, + 8 of 16 rows of the weight, and row lane / 4 of every eight of x.
template <int kTiles>
INGOT_DEVICE void multiply_half(float (&sum)[kTiles][4], const Eight (&a)[2], const Eight (&b)[kTiles]) {
#pragma unroll
  for (int step = 0; step < 4; step += 2) {
    const uint32_t left[4] = {a[0].words[step], a[1].words[step], a[0].words[step + 1], a[1].words[step + 1]};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      multiply_add<Weight>(sum[tile], left, b[tile].words[step], b[tile].words[step + 1]);
    }
  }
}
template <int kHalves, int kTiles>
INGOT_DEVICE void multiply_slab(float (&sum)[kHalves][kTiles][4], const Eight (&a)[kHalves][2],
                                const Eight (&b)[kTiles]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) multiply_half<kTiles>(sum[half], a[half], b);
}

// Two sums of a row of x: rows i and i + 16 of a pair, whose scales are given.
template <class Row>
INGOT_DEVICE void finish(const Product& p, int row, int pair, int i, float sum, float other, float scale,
                         float scale16) {
  if constexpr (Row::kScaled) sum = __fmul_rn(sum, scale), other = __fmul_rn(other, scale16);
  if (p.of.half) {
    if (pair * 16 + i < p.of.half) p.to.write_gated(row, pair * 16 + i, sum, other);
  } else {
    const int col = pair * kPairRows + i;
    if (col < p.of.n) p.to.write(row, col, sum);
    if (col + 16 < p.of.n) p.to.write(row, col + 16, other);
  }
}

#include "few_rows.cuh"

// Many rows: a block computes 16 * kTiles of them and four pairs of the weight, by eight warps of one pair and half of
// the rows each. Slabs of both pass through shared memory, kStages of them at a time. Codes become numbers on the way.
constexpr int kStages = 4;
constexpr int kBlockPairs = 4;
constexpr int kWeightRows = kBlockPairs * kPairRows;

template <int kTiles, class Row>
INGOT_DEVICE void many_rows(const Product& p, Eight* stages) {
  constexpr int kRows = 16 * kTiles, kLines = kWeightRows + kRows;  // lines of 64 bytes in a stage: the weight's, x's
  // pieces of 16 bytes that a thread copies, of as many lines
  constexpr int kWeights = kWeightRows * 4 / kProductThreads, kInputs = kRows * 4 / kProductThreads;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quarter = threadIdx.x % 4;
  const int pair = blockIdx.y * kBlockPairs + warp % kBlockPairs, top = p.first(kRows);
  const int slabs = Row::slabs(p.of.k);
  Row weights[kWeights];
  const Weight* inputs[kInputs];
  bool valid[kInputs];
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
    const int line = (threadIdx.x + i * kProductThreads) / 4;
    weights[i] = Row::at(p.weight, p.of, blockIdx.y * kBlockPairs + line / kPairRows, line % kPairRows);
  }
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
    const int row = top + (threadIdx.x + i * kProductThreads) / 4;
    valid[i] = row < p.rows;
    inputs[i] = valid[i] ? p.input(row) : p.x;
  }
  const auto load = [&](int slab) {
    Eight* to = stages + slab % kStages * kLines * 4 + threadIdx.x;
    const int column = slab * kSlab + quarter * 8;
    const int inside = column < p.of.k ? column : 0;
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      if constexpr (Row::kWide && !Row::kScaled) {
        copy_async(to + i * kProductThreads, weights[i].row + inside, weights[i].valid && column < p.of.k);
      } else {
        to[i * kProductThreads] = weights[i].value(weights[i].load(slab, quarter));
      }
    }
    to += kWeightRows * 4;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if constexpr (Row::kWide) {
        copy_async(to + i * kProductThreads, inputs[i] + inside, valid[i] && column < p.of.k);
      } else {
        to[i * kProductThreads] = load_eight<false>(inputs[i], column, p.of.k, valid[i]);
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
    const Eight* left = stage + (warp % kBlockPairs * kPairRows + lane / 4) * 4 + lane % 4;
    const Eight* right = stage + (kWeightRows + warp / kBlockPairs * 8 * kTiles + lane / 4) * 4 + lane % 4;
    Eight a[2][2], b[kTiles];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = left[8 * 4 * i];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) b[tile] = right[8 * 4 * tile];
    multiply_slab<2, kTiles>(sum, a, b);
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
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = Row::at(p.weight, p.of, pair, lane / 4 + 8 * i).scale();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = top + (warp / kBlockPairs * kTiles + tile) * 8 + lane % 4 * 2 + c % 2;
      const int i = lane / 4 + c / 2 * 8;
      if (row >= p.rows) continue;
      finish<Row>(p, p.target(row), pair, i, total[0][tile][c], total[1][tile][c], scales[c / 2], scales[2 + c / 2]);
    }
  }
}

template <int kTiles, template <bool> class Row>
INGOT_DEVICE void many_rows(const Product& p, unsigned char* shared) {
  Eight* stages = reinterpret_cast<Eight*>(shared);
  if (p.of.k % 8 == 0) {
    many_rows<kTiles, Row<true>>(p, stages);
  } else {
    many_rows<kTiles, Row<false>>(p, stages);
  }
}

// Blocks of few rows that share a multiprocessor: what registers allow.
template <class Row, int kTiles, int kHalves>
constexpr int kFewBlocks = kTiles == 1 ? 2 : 1;
#ifdef INGOT_CODES
template <>
constexpr int kFewBlocks<RowW5ks<true>, 1, 2> = 1;
#endif

// Grids: few rows: pairs, or halves of them; many: (tiles of x, tiles of four pairs)
#define INGOT_FEW_ROWS(name, kTiles, kHalves, Row)                             \
  INGOT_KERNEL_TO_SHARE(kFewThreads, (kFewBlocks<Row<true>, kTiles, kHalves>)) \
  name(INGOT_PRODUCT_PARAMETERS) {                                             \
    __shared__ float parts[kParts * kHalves * kTiles * kWarp * 4];             \
    let_next_begin();                                                          \
    few_rows<kTiles, kHalves, Row>(INGOT_PRODUCT, parts);                      \
  }
#define INGOT_MANY_ROWS(name, kTiles, Row)         \
  INGOT_KERNEL(kProductThreads)                    \
  name(INGOT_PRODUCT_PARAMETERS) {                 \
    INGOT_SHARED(shared);                          \
    wait_for_previous();                           \
    many_rows<kTiles, Row>(INGOT_PRODUCT, shared); \
  }

INGOT_FEW_ROWS(product_8, 1, 2, FloatRow)
INGOT_FEW_ROWS(product_8_half, 1, 1, FloatRow)
INGOT_FEW_ROWS(product_16, 2, 2, FloatRow)
INGOT_FEW_ROWS(product_16_half, 2, 1, FloatRow)
INGOT_MANY_ROWS(product_64, 4, FloatRow)
INGOT_MANY_ROWS(product_128, 8, FloatRow)

#define INGOT_PRODUCTS_OF(format, Row)                  \
  INGOT_FEW_ROWS(product_##format##_8, 1, 2, Row)       \
  INGOT_FEW_ROWS(product_##format##_8_half, 1, 1, Row)  \
  INGOT_FEW_ROWS(product_##format##_16, 2, 2, Row)      \
  INGOT_FEW_ROWS(product_##format##_16_half, 2, 1, Row) \
  INGOT_MANY_ROWS(product_##format##_64, 4, Row)        \
  INGOT_MANY_ROWS(product_##format##_128, 8, Row)
INGOT_FOR_CODES(INGOT_PRODUCTS_OF)

#ifdef INGOT_EXPERTS

// Grids: few rows: (pairs, tiles of experts); many: (tiles of experts, tiles of four pairs)
#define INGOT_FEW_OF_EXPERT(name, kTiles, Row)                                       \
  INGOT_KERNEL(kFewThreads)                                                          \
  name(INGOT_EXPERT_PARAMETERS) {                                                    \
    __shared__ float parts[kParts * 2 * kTiles * kWarp * 4];                         \
    wait_for_previous();                                                             \
    const ExpertTile tile = tiles[blockIdx.y];                                       \
    if (tile.count == 0) return;                                                     \
    const int64_t bytes = Row<true>::bytes({n, k, gated ? n / 2 : 0, group});        \
    few_rows<kTiles, 2, Row>(of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS), parts); \
  }
#define INGOT_MANY_OF_EXPERT(name, kTiles, Row)                                     \
  INGOT_KERNEL(kProductThreads)                                                     \
  name(INGOT_EXPERT_PARAMETERS) {                                                   \
    INGOT_SHARED(shared);                                                           \
    wait_for_previous();                                                            \
    const ExpertTile tile = tiles[blockIdx.x];                                      \
    if (tile.count == 0) return;                                                    \
    const int64_t bytes = Row<true>::bytes({n, k, gated ? n / 2 : 0, group});       \
    many_rows<kTiles, Row>(of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS), shared); \
  }

INGOT_FEW_OF_EXPERT(experts_8, 1, FloatRow)
INGOT_MANY_OF_EXPERT(experts_64, 4, FloatRow)
INGOT_MANY_OF_EXPERT(experts_128, 8, FloatRow)

#define INGOT_EXPERTS_OF(format, Row)                 \
  INGOT_FEW_OF_EXPERT(experts_##format##_8, 1, Row)   \
  INGOT_MANY_OF_EXPERT(experts_##format##_64, 4, Row) \
  INGOT_MANY_OF_EXPERT(experts_##format##_128, 8, Row)
INGOT_FOR_CODES(INGOT_EXPERTS_OF)

#endif

#ifdef INGOT_LATENT

// Grids: few rows: (pairs, 1, heads); many: (tiles of rows, tiles of four pairs, heads)
INGOT_KERNEL(kFewThreads)
heads_8(INGOT_HEAD_PARAMETERS) {
  __shared__ float parts[kParts * 2 * kWarp * 4];
  wait_for_previous();
  if (blockIdx.x == 0) copy_kept(0, *rows, y, kept_from, heads, n, k, kept, narrow);
  const Product p = of_head(INGOT_HEAD_ARGUMENTS);
  if (k % 8 == 0 && kept % 8 == 0) {
    few_rows<1, 2, FloatRow<true>>(p, parts);
  } else {
    few_rows<1, 2, FloatRow<false>>(p, parts);
  }
}
#define INGOT_MANY_OF_HEAD(name, kTiles)                                                 \
  INGOT_KERNEL(kProductThreads)                                                          \
  name(INGOT_HEAD_PARAMETERS) {                                                          \
    INGOT_SHARED(shared);                                                                \
    wait_for_previous();                                                                 \
    const int top = blockIdx.x * 16 * kTiles, count = min(16 * kTiles, *rows - top);     \
    if (blockIdx.y == 0) copy_kept(top, count, y, kept_from, heads, n, k, kept, narrow); \
    const Product p = of_head(INGOT_HEAD_ARGUMENTS);                                     \
    if (k % 8 == 0 && kept % 8 == 0) {                                                   \
      many_rows<kTiles, FloatRow<true>>(p, reinterpret_cast<Eight*>(shared));            \
    } else {                                                                             \
      many_rows<kTiles, FloatRow<false>>(p, reinterpret_cast<Eight*>(shared));           \
    }                                                                                    \
  }
INGOT_MANY_OF_HEAD(heads_64, 4)
INGOT_MANY_OF_HEAD(heads_128, 8)

#endif

#else

// Float32: a thread computes four rows of one output column, k ascending. Grid: (tiles of 16 rows, tiles of 64 columns)
constexpr int kColumns = 64, kRows = 16, kDepth = 16, kEach = kRows * kColumns / kProductThreads;

struct TilesF32 {
  float left[2][kDepth][kColumns + 1];  // of gate and up, if there are both
  float right[kDepth][kRows + 1];
};

INGOT_DEVICE void multiply_f32(const Product& p, TilesF32& tiles) {
  auto& left = tiles.left;
  auto& right = tiles.right;
  const Weight* weight_rows = static_cast<const Weight*>(p.weight);
  const int column = threadIdx.x % kColumns, four = threadIdx.x / kColumns;
  const int first = blockIdx.y * kColumns, top = p.first(kRows), cols = p.of.half ? p.of.half : p.of.n;
  float sum[2][kEach] = {};
  for (int begin = 0; begin < p.of.k; begin += kDepth) {
    for (int at = threadIdx.x; at < kColumns * kDepth; at += kProductThreads) {
      const int depth = at % kDepth, row = first + at / kDepth, k_at = begin + depth;
      const bool valid = row < cols && k_at < p.of.k;
      left[0][depth][at / kDepth] = valid ? weight_rows[static_cast<int64_t>(row) * p.of.k + k_at].value : 0.f;
      if (p.of.half)
        left[1][depth][at / kDepth] =
            valid ? weight_rows[static_cast<int64_t>(p.of.half + row) * p.of.k + k_at].value : 0.f;
    }
    for (int at = threadIdx.x; at < kRows * kDepth; at += kProductThreads) {
      const int depth = at % kDepth, row = top + at / kDepth, k_at = begin + depth;
      const bool valid = row < p.rows && k_at < p.of.k;
      right[depth][at / kDepth] = valid ? p.input(row)[k_at].value : 0.f;
    }
    __syncthreads();
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float factor = right[depth][four * kEach + i];
        sum[0][i] += left[0][depth][column] * factor;
        if (p.of.half) sum[1][i] += left[1][depth][column] * factor;
      }
    }
    __syncthreads();
  }
  if (first + column >= cols) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = top + four * kEach + i;
    if (row >= p.rows) return;
    if (p.of.half) {
      p.to.write_gated(p.target(row), first + column, sum[0][i], sum[1][i]);
    } else {
      p.to.write(p.target(row), first + column, sum[0][i]);
    }
  }
}

INGOT_KERNEL(kProductThreads)
product_f32(INGOT_PRODUCT_PARAMETERS) {
  __shared__ TilesF32 shared;
  wait_for_previous();
  multiply_f32(INGOT_PRODUCT, shared);
}

#ifdef INGOT_EXPERTS
// Grid: (tiles of experts, tiles of 64 columns)
INGOT_KERNEL(kProductThreads)
experts_f32(INGOT_EXPERT_PARAMETERS) {
  __shared__ TilesF32 shared;
  wait_for_previous();
  const ExpertTile tile = tiles[blockIdx.x];
  if (tile.count == 0) return;
  multiply_f32(of_expert(tile, static_cast<int64_t>(n) * k * sizeof(Weight), INGOT_EXPERT_ARGUMENTS), shared);
}
#endif

#ifdef INGOT_LATENT
// Grid: (tiles of 16 rows, tiles of 64 columns, heads)
INGOT_KERNEL(kProductThreads)
heads_f32(INGOT_HEAD_PARAMETERS) {
  __shared__ TilesF32 shared;
  wait_for_previous();
  const int top = blockIdx.x * kRows;
  if (blockIdx.y == 0) copy_kept(top, min(kRows, *rows - top), y, kept_from, heads, n, k, kept, narrow);
  multiply_f32(of_head(INGOT_HEAD_ARGUMENTS), shared);
}
#endif

#endif

#include "warp_fp8.cuh"
#include "wide_products.cuh"
