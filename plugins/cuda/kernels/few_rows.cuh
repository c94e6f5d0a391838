// Products of few rows, a part of products.cu: 8 * kTiles rows at most. Each warp computes a part of K for the block's
// pair, or for a half of it (16 rows of a weight without a gate), straight from global memory. The first weights are
// under way before x is there.
#pragma once

constexpr int kFewThreads = kParts * kWarp;  // of a block: a warp for each part

// What a lane reads of x.
template <int kTiles>
struct FewRows {
  const Weight* from[kTiles];  // of the lane; of the first row of x, where it has none
  bool valid[kTiles];
  int k;

  INGOT_DEVICE explicit FewRows(const Product& p) : k(p.of.k) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = 8 * tile + threadIdx.x % kWarp / 4;
      valid[tile] = row < p.rows;
      from[tile] = valid[tile] ? p.input(row) : p.x;
    }
  }
  template <bool kWide>
  INGOT_DEVICE void load(Eight (&to)[kTiles], int slab) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      to[tile] = load_eight<kWide>(from[tile], slab * kSlab + 8 * (threadIdx.x % 4), k, valid[tile]);
    }
  }
};

// The same of slabs begin to end - 1, and zeros of the others. Lanes without a row may get any numbers.
template <int kTiles>
struct FewRowsOfPart {
  FewRows<kTiles> rows;
  const Weight* from[kTiles];  // of the lane's columns of slab 0
  int begin, end;
  unsigned whole;  // so many slabs from `begin` on are loaded as they lie

  INGOT_DEVICE FewRowsOfPart(const Product& p, int begin, int end)
      : rows(p), begin(begin), end(end), whole(p.of.k % 8 == 0 ? max(min(end, p.of.k / kSlab) - begin, 0) : 0) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) from[tile] = rows.from[tile] + 8 * (threadIdx.x % 4);
  }
  INGOT_DEVICE void load(Eight (&to)[kTiles], int slab) const {
    if (static_cast<unsigned>(slab - begin) < whole) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        to[tile] = *reinterpret_cast<const Eight*>(__builtin_assume_aligned(from[tile] + slab * kSlab, 16));
      }
    } else if (begin <= slab && slab < end) {
      rows.template load<false>(to, slab);
    } else {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) to[tile] = Eight{{0, 0, 0, 0}};
    }
  }
};

// The sums of a warp's part of K: of float weights.
template <int kTiles, int kHalves, class Row>
INGOT_DEVICE void add_slabs(float (&sum)[kHalves][kTiles][4], const Product& p, int pair, int top, int begin, int end) {
  constexpr int kAhead = Row::kAhead * 2 / kHalves;              // slabs of the weight under way
  constexpr int kNear = kTiles == 1 || kAhead < 4 ? kAhead : 4;  // of x, which is in the L2 cache
  const int lane = threadIdx.x % kWarp;
  Row left[2 * kHalves];
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) left[i] = Row::at(p.weight, p.of, pair, top + lane / 4 + 8 * i);
  Eight a[kAhead][kHalves][2];
  const auto load_weights = [&](int slot, int slab) {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) a[slot][i / 2][i % 2] = left[i].load(slab, lane % 4);
  };
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (begin + slot < end) load_weights(slot, begin + slot);
  }
  wait_for_previous();
  const FewRows<kTiles> x(p);
  Eight b[kNear][kTiles];
#pragma unroll
  for (int slot = 0; slot < kNear; ++slot) {
    if (begin + slot < end) x.template load<Row::kWide>(b[slot], begin + slot);
  }
  for (int slab = begin; slab < end; slab += kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      if (slab + slot >= end) break;
      multiply_slab<kHalves, kTiles>(sum, a[slot], b[slot % kNear]);
      if (slab + slot + kAhead < end) load_weights(slot, slab + slot + kAhead);
      if (slab + slot + kNear < end) x.template load<Row::kWide>(b[slot % kNear], slab + slot + kNear);
    }
  }
}

// Of codes. A part may begin and end within a strip, of which it multiplies zeros with the other slabs.
template <int kTiles, int kHalves, class Row>
INGOT_DEVICE void add_strips(float (&sum)[kHalves][kTiles][4], const Product& p, int pair, int top, int begin,
                             int end) {
  using Strip = typename Row::template Strip<kHalves>;
  constexpr int kStrips = Strip::kStrips;
  Strip left(p.weight, p.of, pair, top);
  const int first = begin / kStripSlabs;
  typename Strip::Raw a[kStrips] = {};
#pragma unroll
  for (int slab = 0; slab < kStripSlabs; ++slab) left.load_group(first, slab, end);
#pragma unroll
  for (int slot = 0; slot < kStrips; ++slot) {
#pragma unroll
    for (int slab = 0; slab < kStripSlabs; ++slab) left.load(a[slot], first + slot, slab, end);
  }
  wait_for_previous();
  const FewRowsOfPart<kTiles> x(p, begin, end);
  constexpr int kNear = 2;  // slabs of x under way, which is in the L2 cache
  Eight b[kNear][kTiles];
#pragma unroll
  for (int slab = 0; slab < kNear; ++slab) {
    x.load(b[slab], first * kStripSlabs + slab);
  }
  left.choose([&](auto strip_by_way) {
    for (int strips = first; strips * kStripSlabs < end; strips += kStrips) {
#pragma unroll
      for (int slot = 0; slot < kStrips; ++slot) {
        const int strip = strips + slot;
        if (strip * kStripSlabs >= end) break;
#pragma unroll
        for (int slab = 0; slab < kStripSlabs; ++slab) {
          strip_by_way.begin(strip, slab, end);
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            Eight values[2];
            strip_by_way.values(values, a[slot], slab, half);
            multiply_half<kTiles>(sum[half], values, b[slab % kNear]);
          }
          strip_by_way.load(a[slot], strip + kStrips, slab, end);
          x.load(b[slab % kNear], strip * kStripSlabs + slab + kNear);
        }
      }
    }
  });
}

// Which lanes of few rows compute row i of the first or the second 16 of a weight: those of an eighth of the warp, in a
// half of their sums, as the upper or the lower row.
struct RowPlace {
  int eighth, half, lower;
};
template <class Row, int kHalves>
INGOT_DEVICE RowPlace place_of_row(int i, int sixteen) {
  if constexpr (!Row::kScaled) {
    return {i % 8, sixteen, i / 8};
  } else if constexpr (Row::template Strip<kHalves>::kTogether == 4) {
    return {4 * sixteen + i / 4, i / 2 % 2, i % 2};
  } else {
    return {i / 2, sixteen, i % 2};
  }
}

template <int kTiles, int kHalves, class Row>
INGOT_DEVICE void few_rows(const Product& p, float* parts) {
  const auto pair_of = [](int block) { return block * kHalves / 2; };
  const auto top_of = [](int block) { return kHalves == 2 ? 0 : block % 2 * 16; };  // the first row of 32
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, block = blockIdx.x;
  const int slabs = Row::slabs(p.of.k), begin = part_begin(warp, slabs), end = part_begin(warp + 1, slabs);
  float sum[kHalves][kTiles][4] = {};
  if constexpr (Row::kScaled) {
    add_strips<kTiles, kHalves, Row>(sum, p, pair_of(block), top_of(block), begin, end);
  } else {
    add_slabs<kTiles, kHalves, Row>(sum, p, pair_of(block), top_of(block), begin, end);
  }
  // parts[warp][half][tile][lane][4]
  constexpr int kHalf = kTiles * kWarp * 4;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        parts[(kHalves * warp + half) * kHalf + (tile * kWarp + lane) * 4 + c] = sum[half][tile][c];
      }
    }
  }
  __syncthreads();
  const int i = threadIdx.x % 16, row = threadIdx.x / 16;  // of 16 rows of the weight, of x
  if (row >= 8 * kTiles || row >= p.rows) return;
  int place[kHalves];  // of the sums of rows i and i + 16 within those of a warp
#pragma unroll
  for (int sixteen = 0; sixteen < kHalves; ++sixteen) {
    const RowPlace at = place_of_row<Row, kHalves>(i, sixteen);
    place[sixteen] = at.half * kHalf + (row / 8 * kWarp + at.eighth * 4 + row % 8 / 2) * 4 + at.lower * 2 + row % 2;
  }
  float total[kHalves] = {};
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int sixteen = 0; sixteen < kHalves; ++sixteen) {
      total[sixteen] += parts[kHalves * part * kHalf + place[sixteen]];
    }
  }
  const int same = block_anew(), pair = pair_of(same), top = top_of(same);
  const float scale = Row::at(p.weight, p.of, pair, top + i).scale();
  if constexpr (kHalves == 2) {
    finish<Row>(p, p.target(row), pair, i, total[0], total[1], scale, Row::at(p.weight, p.of, pair, i + 16).scale());
  } else if (const int col = pair * kPairRows + top + i; col < p.of.n) {
    p.to.write(p.target(row), col, Row::kScaled ? __fmul_rn(total[0], scale) : total[0]);
  }
}

template <int kTiles, int kHalves, template <bool> class Row>
INGOT_DEVICE void few_rows(const Product& p, float* parts) {
  if constexpr (Row<true>::kScaled) {
    few_rows<kTiles, kHalves, Row<true>>(p, parts);
  } else if (p.of.k % 8 == 0) {
    few_rows<kTiles, kHalves, Row<true>>(p, parts);
  } else {
    few_rows<kTiles, kHalves, Row<false>>(p, parts);
  }
}
