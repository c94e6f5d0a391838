// Products of few rows of x.
#pragma once

#include "product.cuh"

#ifndef INGOT_WEIGHT_IS_F32

// Few rows: 8 * kTiles at most. Each warp computes a part of K for the block's pair, or for a half of it (16 rows of a
// weight without a gate), straight from global memory. The first weights are under way before x is there.
template <int kTiles, int kHalves, class Rows>
INGOT_DEVICE void few_rows(const Product& p, float* parts, Neighbours<4>* tables) {
  constexpr int kAhead = Rows::kAhead, kPiece = Rows::kPiece;  // pieces of the weight under way, of so many slabs
  constexpr int kSlots = kAhead * kPiece;
  constexpr bool kAll = kSlots < 4 || (kTiles == 1 && !Rows::kScaled);
  constexpr int kNear = kAll ? kSlots : kSlots % 4 ? 3 : 4;  // slabs of x under way, which is in the L2 cache
  static_assert(kSlots % kNear == 0);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quarter = lane % 4;
  const int pair = blockIdx.x * kHalves / 2, top = kHalves == 2 ? 0 : blockIdx.x % 2 * 16;  // the first row of 32
  const int slabs = Rows::slabs(p.of.k), begin = first_slab<Rows>(warp, slabs), end = first_slab<Rows>(warp + 1, slabs);
  const int row_of_lane = top + Rows::first(lane / 4);
  Rows left = Rows::at(p.weight, p.of, pair, row_of_lane);
  typename Rows::Piece a[kAhead];
  typename Rows::RawGroup groups[kSlots];
  const auto load_weights = [&](int slot, int slab) {
    a[slot] = left.load_piece(slab / kPiece, quarter);
    if constexpr (Rows::kGrouped) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) groups[slot * kPiece + i] = left.load_group(slab + i, quarter);
    }
  };
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (begin + slot * kPiece < end) load_weights(slot, begin + slot * kPiece);
  }
  if constexpr (Rows::kTables) {
    const bool writes = warp == 0 && quarter == 0 && row_of_lane % 16 == 0;
    left.share(tables + (row_of_lane - top) / 16 * 2, writes, p.weight, p.of, pair, row_of_lane);
    __syncthreads();
  }
  wait_for_previous();
  const Weight* from[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int row = 8 * tile + lane / 4;
    from[tile] = row < p.rows ? p.input(row) : p.x;
  }
  Eight b[kNear][kTiles];
  const auto load_inputs = [&](int slot, int slab, bool whole) {  // whole: the slab ends before K does
    const int k = slab * kSlab + 8 * quarter;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool valid = whole || 8 * tile + lane / 4 < p.rows;  // where x has no row, lanes take another one
      b[slot][tile] = load_eight<Rows::kWide>(from[tile], k, whole ? k + 8 : p.of.k, valid);
    }
  };
#pragma unroll
  for (int slot = 0; slot < kNear; ++slot) {
    if (begin + slot < end) load_inputs(slot, begin + slot, false);
  }
  float sum[kTiles][kHalves][4] = {};
  const bool halves = Rows::halves(p.of);
  const int bits = group_bits(p.of);
  GroupSums<kHalves, kTiles> open = {};
  const auto multiply = [&](int place, int slab) {
    Eight values[2 * kHalves];
    left.values(values, left.slab_of(a[place / kPiece], place % kPiece));
    add_slab<Rows, kHalves, kTiles>(
        sum, open, values, [&](int tile) { return b[place % kNear][tile]; }, halves,
        (slab + 1 & bits) == 0 || slab + 1 == end, groups[place], [&](const auto& raw) { return left.of_group(raw); });
  };
  int slab = begin;
  // Codes, as long as the slabs to load are there, and whole: without conditions. Floats have no registers for two
  // loops.
  constexpr bool kUnasked = Rows::kWide && Rows::kScaled;
  for (const int whole = kUnasked ? min(end, p.of.k / kSlab) : 0; kUnasked && slab + 2 * kSlots <= whole;
       slab += kSlots) {
#pragma unroll
    for (int place = 0; place < kSlots; ++place) {
      multiply(place, slab + place);
      load_inputs(place % kNear, slab + place + kNear, true);
      if (place % kPiece == kPiece - 1) load_weights(place / kPiece, slab + place + 1 - kPiece + kSlots);
    }
  }
  for (; slab < end; slab += kSlots) {
#pragma unroll
    for (int place = 0; place < kSlots; ++place) {
      const int at = slab + place;
      if (at >= end) break;
      multiply(place, at);
      if (at + kNear < end) load_inputs(place % kNear, at + kNear, false);
      if (place % kPiece == kPiece - 1 && at + 1 - kPiece + kSlots < end) {
        load_weights(place / kPiece, at + 1 - kPiece + kSlots);
      }
    }
  }
  // parts[warp][half][tile][lane][4]
  constexpr int kHalf = kTiles * kWarp * 4;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        parts[(kHalves * warp + half) * kHalf + (tile * kWarp + lane) * 4 + c] = sum[tile][half][c];
      }
    }
  }
  __syncthreads();
  const int i = threadIdx.x % 16, row = threadIdx.x / 16;  // of a half, of x
  if (row >= 8 * kTiles || row >= p.rows) return;
  float total[kHalves] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int number = Rows::number_of(i + 16 * half), group = Rows::group_of(i + 16 * half);
    const int place = number / 2 * kHalf + (row / 8 * kWarp + group * 4 + row % 8 / 2) * 4 + number % 2 * 2 + row % 2;
    for (int part = 0; part < kParts; ++part) total[half] += parts[kHalves * part * kHalf + place];
  }
  const float scale = Rows::scale(p.weight, p.of, pair, top + i);
  if constexpr (kHalves == 2) {
    finish<Rows>(p, p.target(row), pair, i, total[0], total[1], scale, Rows::scale(p.weight, p.of, pair, i + 16));
  } else if (const int col = pair * kPairRows + top + i; col < p.of.n) {
    p.to.write(p.target(row), col, Rows::kScaled ? __fmul_rn(total[0], scale) : total[0]);
  }
}

template <int kTiles, int kHalves, template <int, bool> class Rows>
INGOT_DEVICE void few_rows(const Product& p, float* parts, Neighbours<4>* tables) {
  if (p.of.k % 8 == 0) {
    few_rows<kTiles, kHalves, Rows<2 * kHalves, true>>(p, parts, tables);
  } else {
    few_rows<kTiles, kHalves, Rows<2 * kHalves, false>>(p, parts, tables);
  }
}

#endif
