// A product, and how slabs of it are added up: what kernels of few and of many rows share.
#pragma once

#include "epilogue.cuh"
#include "kept_rows.cuh"

constexpr int kProductThreads = 256;  // of a block that computes many rows

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

#ifndef INGOT_WEIGHT_IS_F32

constexpr int kParts = 8;
constexpr int kFewThreads = kParts * kWarp;  // of a block that computes few rows: a warp for each part

INGOT_DEVICE int part_begin(int part, int slabs) {
  return static_cast<int>(static_cast<int64_t>(part) * slabs / kParts);
}

// A slab of 16 rows of the weight, of which a lane holds two, with eight of x, of which it holds one.
INGOT_DEVICE void multiply_rows(float (&sum)[4], const Eight& upper, const Eight& lower, const Eight& b) {
#pragma unroll
  for (int step = 0; step < 4; step += 2) {
    const uint32_t left[4] = {upper.words[step], lower.words[step], upper.words[step + 1], lower.words[step + 1]};
    multiply_add<Weight>(sum, left, b.words[step], b.words[step + 1]);
  }
}

// Two sums of a row of x: rows i and i + 16 of a pair, whose scales are given.
template <class Rows>
INGOT_DEVICE void finish(const Product& p, int row, int pair, int i, float sum, float other, float scale,
                         float scale16) {
  if constexpr (Rows::kScaled) sum = __fmul_rn(sum, scale), other = __fmul_rn(other, scale16);
  if (p.of.half) {
    if (pair * 16 + i < p.of.half) p.to.write_gated(row, pair * 16 + i, sum, other);
  } else {
    const int col = pair * kPairRows + i;
    if (col < p.of.n) p.to.write(row, col, sum);
    if (col + 16 < p.of.n) p.to.write(row, col + 16, other);
  }
}

// What a group adds up from zero: sums of its columns for eight rows of x at a time, and the sums of x over them.
template <int kHalves, int kTiles>
struct GroupSums {
  float sum[kTiles][kHalves][4], all[kTiles][4];
};

// Slabs of a group, less one: behind those whose number has none of these bits a group ends. Without groups none does.
INGOT_DEVICE int group_bits(const Sizes& of) { return of.group ? (of.group + kSlab - 1) / kSlab - 1 : 0x7fffffff; }

// A slab, or a half of it where others of x are zero. The sum of x is a product with ones.
template <class Rows, int kHalves>
INGOT_DEVICE void multiply_group(float (&sum)[kHalves][4], float (&all)[4], const Eight (&a)[2 * kHalves],
                                 const Eight& b) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) multiply_rows(sum[half], a[2 * half], a[2 * half + 1], b);
  if constexpr (Rows::kShifts) {
    const Eight ones{{kOnes, kOnes, kOnes, kOnes}};
    multiply_rows(all, ones, ones, b);
  }
}
template <class Rows, int kHalves>
INGOT_DEVICE void add_group(float (&to)[kHalves][4], const float (&sum)[kHalves][4], const float (&all)[4],
                            const OfGroup<2 * kHalves>& group) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      to[half][c] = fmaf(group.scale[2 * half + c / 2], sum[half][c], to[half][c]);
      if constexpr (Rows::kShifts) to[half][c] = fmaf(group.shift[2 * half + c / 2], all[c % 2], to[half][c]);
    }
  }
}

// Where a slab has two groups, lanes hold what the one of their columns has. Gives what the first and the second have.
template <class Raw>
INGOT_DEVICE void exchange(Raw& first, Raw& second, int quarter) {
  constexpr int kWords = sizeof(Raw::words) / 4;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t own = first.words[i], other = __shfl_xor_sync(kAllLanes, own, 2);
    first.words[i] = quarter < 2 ? own : other;
    second.words[i] = quarter < 2 ? other : own;
  }
}

// sum += a slab's product; where there are groups, when one ends, or the part does. inputs: tile -> 16 bytes of its
// rows of x. halves: the slab has two groups of columns. raw, of_group: what groups have in the lane's columns, and its
// conversion to OfGroup.
template <class Rows, int kHalves, int kTiles, class B, class Raw, class F>
INGOT_DEVICE void add_slab(float (&sum)[kTiles][kHalves][4], GroupSums<kHalves, kTiles>& open,
                           const Eight (&a)[2 * kHalves], B inputs, bool halves, bool ends, Raw raw, F of_group) {
  if constexpr (!Rows::kGrouped) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Eight b = inputs(tile);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_rows(sum[tile][half], a[2 * half], a[2 * half + 1], b);
    }
  } else if (!halves) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      multiply_group<Rows, kHalves>(open.sum[tile], open.all[tile], a, inputs(tile));
    }
    if (!ends) return;
    const auto group = of_group(raw);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      add_group<Rows, kHalves>(sum[tile], open.sum[tile], open.all[tile], group);
    }
    open = {};
  } else {
    const int quarter = threadIdx.x % 4;
    Raw second = raw;
    exchange(raw, second, quarter);
#pragma unroll
    for (int number = 0; number < 2; ++number) {
      const auto group = of_group(number ? second : raw);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Eight some = inputs(tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) some.words[i] = quarter / 2 == number ? some.words[i] : 0;
        float own[kHalves][4] = {}, all[4] = {};
        multiply_group<Rows, kHalves>(own, all, a, some);
        add_group<Rows, kHalves>(sum[tile], own, all, group);
      }
    }
  }
}

// The slab with which a part begins. What a load brings stays together.
template <class Rows>
INGOT_DEVICE int first_slab(int part, int slabs) {
  return part_begin(part, slabs / Rows::kPiece) * Rows::kPiece;
}

#endif
