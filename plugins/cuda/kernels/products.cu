// Matrix products with their epilogues: y[m][n] = epilogue(x[m][k] . weight[n][k]).
//
// The bits of a row do not depend on how many rows there are:
//   K is cut into slabs of 32, and the slabs into kParts parts. A part is added up from zero, slab by slab; the parts
//   are added in order. Every kernel here does it so. In a slab, lane i holds k = 8 * (i % 4) ... + 7 of row i / 4, the
//   16 bytes as they lie in memory. Two mma of 16 k take them, and x alike: so the matrix unit pairs what belongs
//   together, in places that are the same in every kernel.
// A warp computes a pair of 16 rows of the weight: neighbours, or those of gate and up that belong together.
#include "experts.cuh"
#include "few_rows.cuh"
#include "many_rows.cuh"

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

// Of so many panels.
#define INGOT_TABLES(name, panels) __shared__ Neighbours<4> name[2 * (panels)]

// Grids: few rows: pairs, or halves of them; many: (tiles of x, tiles of four pairs)
#define INGOT_FEW_ROWS(name, kTiles, kHalves, Rows)                          \
  INGOT_KERNEL_TO_SHARE(kFewThreads, (Rows<2, true>::kShare) - (kTiles > 1)) \
  name(INGOT_PRODUCT_PARAMETERS) {                                           \
    __shared__ float parts[kParts * kHalves * kTiles * kWarp * 4];           \
    let_next_begin();                                                        \
    INGOT_TABLES(tables, kHalves);                                           \
    few_rows<kTiles, kHalves, Rows>(INGOT_PRODUCT, parts, tables);           \
  }
#define INGOT_MANY_ROWS(name, kTiles, Rows)                 \
  INGOT_KERNEL(kProductThreads)                             \
  name(INGOT_PRODUCT_PARAMETERS) {                          \
    INGOT_SHARED(shared);                                   \
    wait_for_previous();                                    \
    INGOT_TABLES(tables, 2 * kBlockPairs);                  \
    many_rows<kTiles, Rows>(INGOT_PRODUCT, shared, tables); \
  }

INGOT_FEW_ROWS(product_8, 1, 2, FloatRows)
INGOT_FEW_ROWS(product_8_half, 1, 1, FloatRows)
INGOT_FEW_ROWS(product_16, 2, 2, FloatRows)
INGOT_FEW_ROWS(product_16_half, 2, 1, FloatRows)
INGOT_MANY_ROWS(product_64, 4, FloatRows)
INGOT_MANY_ROWS(product_128, 8, FloatRows)

#define INGOT_PRODUCTS_OF(format, Rows)                  \
  INGOT_FEW_ROWS(product_##format##_8, 1, 2, Rows)       \
  INGOT_FEW_ROWS(product_##format##_8_half, 1, 1, Rows)  \
  INGOT_FEW_ROWS(product_##format##_16, 2, 2, Rows)      \
  INGOT_FEW_ROWS(product_##format##_16_half, 2, 1, Rows) \
  INGOT_MANY_ROWS(product_##format##_64, 4, Rows)        \
  INGOT_MANY_ROWS(product_##format##_128, 8, Rows)
INGOT_FOR_CODES(INGOT_PRODUCTS_OF)

#ifdef INGOT_EXPERTS

// Grids: few rows: (pairs, tiles of experts); many: (tiles of experts, tiles of four pairs)
#define INGOT_FEW_OF_EXPERT(name, kTiles, Rows)                                               \
  INGOT_KERNEL(kFewThreads)                                                                   \
  name(INGOT_EXPERT_PARAMETERS) {                                                             \
    __shared__ float parts[kParts * 2 * kTiles * kWarp * 4];                                  \
    wait_for_previous();                                                                      \
    const ExpertTile tile = tiles[blockIdx.y];                                                \
    if (tile.count == 0) return;                                                              \
    const int64_t bytes = Rows<1, true>::bytes({n, k, gated ? n / 2 : 0, group});             \
    INGOT_TABLES(tables, 2);                                                                  \
    few_rows<kTiles, 2, Rows>(of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS), parts, tables); \
  }
#define INGOT_MANY_OF_EXPERT(name, kTiles, Rows)                                             \
  INGOT_KERNEL(kProductThreads)                                                              \
  name(INGOT_EXPERT_PARAMETERS) {                                                            \
    INGOT_SHARED(shared);                                                                    \
    wait_for_previous();                                                                     \
    const ExpertTile tile = tiles[blockIdx.x];                                               \
    if (tile.count == 0) return;                                                             \
    const int64_t bytes = Rows<1, true>::bytes({n, k, gated ? n / 2 : 0, group});            \
    INGOT_TABLES(tables, 2 * kBlockPairs);                                                   \
    many_rows<kTiles, Rows>(of_expert(tile, bytes, INGOT_EXPERT_ARGUMENTS), shared, tables); \
  }

INGOT_FEW_OF_EXPERT(experts_8, 1, FloatRows)
INGOT_MANY_OF_EXPERT(experts_64, 4, FloatRows)
INGOT_MANY_OF_EXPERT(experts_128, 8, FloatRows)

#define INGOT_EXPERTS_OF(format, Rows)                 \
  INGOT_FEW_OF_EXPERT(experts_##format##_8, 1, Rows)   \
  INGOT_MANY_OF_EXPERT(experts_##format##_64, 4, Rows) \
  INGOT_MANY_OF_EXPERT(experts_##format##_128, 8, Rows)
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
    few_rows<1, 2, FloatRows<4, true>>(p, parts, nullptr);
  } else {
    few_rows<1, 2, FloatRows<4, false>>(p, parts, nullptr);
  }
}
#define INGOT_MANY_OF_HEAD(name, kTiles)                                                      \
  INGOT_KERNEL(kProductThreads)                                                               \
  name(INGOT_HEAD_PARAMETERS) {                                                               \
    INGOT_SHARED(shared);                                                                     \
    wait_for_previous();                                                                      \
    const int top = blockIdx.x * 16 * kTiles, count = min(16 * kTiles, *rows - top);          \
    if (blockIdx.y == 0) copy_kept(top, count, y, kept_from, heads, n, k, kept, narrow);      \
    const Product p = of_head(INGOT_HEAD_ARGUMENTS);                                          \
    if (k % 8 == 0 && kept % 8 == 0) {                                                        \
      many_rows<kTiles, true, FloatRows>(p, top, reinterpret_cast<Eight*>(shared), nullptr);  \
    } else {                                                                                  \
      many_rows<kTiles, false, FloatRows>(p, top, reinterpret_cast<Eight*>(shared), nullptr); \
    }                                                                                         \
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

#include "wide_products.cuh"
