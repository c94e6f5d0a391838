// Products of many rows of x.
#pragma once

#include "product.cuh"

#ifndef INGOT_WEIGHT_IS_F32

// Many rows: a block computes 16 * kTiles of them and four pairs of the weight, by eight warps of one pair and half of
// the rows each. Slabs of both pass through shared memory, kStages of them at a time. Codes become numbers on the way.
constexpr int kStages = 4;
constexpr int kBlockPairs = 4;
constexpr int kWeightRows = kBlockPairs * kPairRows;

// What a thread copies of the weight for each slab: kPieces of 16 bytes of shared memory. Floats lie one by one, codes
// of two rows together.
template <template <int, bool> class Rows, bool kWide>
struct ManyWeights {
  static constexpr int kPieces = kWeightRows * 4 / kProductThreads;
  static constexpr bool kScaled = Rows<1, kWide>::kScaled, kCopied = kWide && !kScaled;
  static constexpr int kTogether = kScaled ? kPieces : 1;
  using Some = Rows<kTogether, kWide>;

  Some rows[kPieces / kTogether];
  const Weight* from[kPieces];  // of floats that are copied, which is a row of the weight
  int end[kPieces];             // of its columns; 0 where there is no such row
  typename Some::Raw next;      // of codes: the slab that is written next

  INGOT_DEVICE static int line(int i) {  // of piece i; the thread's pieces have the same quarter
    return kScaled ? threadIdx.x / 4 * kTogether + i : (threadIdx.x + i * kProductThreads) / 4;
  }
  INGOT_DEVICE void begin(const Product& p, Neighbours<4>* tables) {
#pragma unroll
    for (int i = 0; i < kPieces; i += kTogether) {
      const int pair = blockIdx.y * kBlockPairs + line(i) / kPairRows, row = line(i) % kPairRows;
      const Some found = Some::at(p.weight, p.of, pair, row);
      if constexpr (kCopied) {
        from[i] = found.from[0], end[i] = found.valid[0] ? p.of.k : 0;
      } else {
        rows[i / kTogether] = found;
      }
      if constexpr (Some::kTables) {
        const bool writes = row % 16 == 0 && threadIdx.x % 4 == 0;
        rows[0].share(tables + line(i) / 16 * 2, writes, p.weight, p.of, pair, row);
        __syncthreads();
      }
    }
  }
  INGOT_DEVICE void fetch(int slab) {
    if constexpr (kScaled) next = rows[0].load(slab, threadIdx.x % 4);
  }
  // The slab that was fetched last, and fetches the next one; of floats the slab in which the thread has these columns.
  INGOT_DEVICE void copy(Eight* stage, int slab, int slabs, int column, int inside) {
    if constexpr (kScaled) {
      Eight values[kTogether];
      rows[0].values(values, next);
      if (slab + 1 < slabs) fetch(slab + 1);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) stage[line(i) * 4 + threadIdx.x % 4] = values[i];
    } else {
      Eight* to = stage + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if constexpr (kCopied) {
          copy_async(to + i * kProductThreads, from[i] + inside, column < end[i]);
        } else {
          to[i * kProductThreads] = rows[i].load(slab, threadIdx.x % 4).rows[0];
        }
      }
    }
  }
};

// What groups have in the slab that is multiplied next, of a lane's four rows, which are eight apart.
template <class One>
struct FourGroups {
  static constexpr int kWords = sizeof(typename One::RawGroup) / 4;
  struct Raw {
    uint32_t words[4 * kWords];
  };

  One rows[2];  // 16 apart: of both panels
  Raw raw;

  INGOT_DEVICE void begin(const Product& p, int pair, int first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (One::kGrouped) rows[i] = One::at(p.weight, p.of, pair, first + 16 * i);
    }
  }
  INGOT_DEVICE void load(int slab, int quarter) {
    if constexpr (One::kGrouped) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto each = rows[i / 2].load_group(slab, quarter, i % 2 * 8);
#pragma unroll
        for (int word = 0; word < kWords; ++word) raw.words[i * kWords + word] = each.words[word];
      }
    }
  }
  INGOT_DEVICE OfGroup<4> of(const Raw& loaded) const {
    OfGroup<4> found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      typename One::RawGroup each;
#pragma unroll
      for (int word = 0; word < kWords; ++word) each.words[word] = loaded.words[i * kWords + word];
      const auto one = rows[i / 2].of_group(each);
      found.scale[i] = one.scale[0], found.shift[i] = one.shift[0];
    }
    return found;
  }
};

template <int kTiles, bool kWide, template <int, bool> class Rows>
INGOT_DEVICE void many_rows(const Product& p, int top, Eight* stages, Neighbours<4>* tables) {
  using One = Rows<1, kWide>;
  constexpr int kRows = 16 * kTiles, kLines = kWeightRows + kRows;  // lines of 64 bytes in a stage: the weight's, x's
  constexpr int kInputs = kRows * 4 / kProductThreads;              // pieces of 16 bytes that a thread copies
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quarter = threadIdx.x % 4;
  const int pair = blockIdx.y * kBlockPairs + warp % kBlockPairs;
  const int slabs = One::slabs(p.of.k);
  ManyWeights<Rows, kWide> weights;
  weights.begin(p, tables);
  const Weight* inputs[kInputs];
  bool valid[kInputs];
#pragma unroll
  for (int i = 0; i < kInputs; ++i) {
    const int row = top + (threadIdx.x + i * kProductThreads) / 4;
    valid[i] = row < p.rows;
    inputs[i] = valid[i] ? p.input(row) : p.x;
  }
  const auto load = [&](int slab) {
    Eight* to = stages + slab % kStages * kLines * 4;
    const int column = slab * kSlab + quarter * 8;
    const int inside = column < p.of.k ? column : 0;
    weights.copy(to, slab, slabs, column, inside);
    to += kWeightRows * 4 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if constexpr (kWide) {
        copy_async(to + i * kProductThreads, inputs[i] + inside, valid[i] && column < p.of.k);
      } else {
        to[i * kProductThreads] = load_eight<false>(inputs[i], column, p.of.k, valid[i]);
      }
    }
    copy_commit();
  };
  if (slabs > 0) weights.fetch(0);
  for (int slab = 0; slab < kStages - 1; ++slab) {
    if (slab < slabs) {
      load(slab);
    } else {
      copy_commit();
    }
  }
  FourGroups<One> groups;
  groups.begin(p, pair, lane / 4);
  groups.load(0, quarter);
  const bool halves = One::halves(p.of);
  const int bits = group_bits(p.of);
  GroupSums<2, kTiles> open = {};
  float sum[kTiles][2][4] = {}, total[kTiles][2][4] = {};
  int part = 1, boundary = 0;  // where the part ends, in slabs
  while (part <= kParts && (boundary = first_slab<One>(part, slabs)) == 0) ++part;
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
    Eight a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = left[8 * 4 * i];
    add_slab<One, 2, kTiles>(
        sum, open, a, [&](int tile) { return right[8 * 4 * tile]; }, halves,
        (slab + 1 & bits) == 0 || slab + 1 >= boundary, groups.raw, [&](const auto& raw) { return groups.of(raw); });
    if (slab + 1 < slabs) groups.load(slab + 1, quarter);
    if (slab + 1 < boundary) continue;
    while (part <= kParts && (boundary = first_slab<One>(part, slabs)) <= slab + 1) ++part;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          total[tile][half][c] += sum[tile][half][c];
          sum[tile][half][c] = 0.f;
        }
      }
    }
  }
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = One::scale(p.weight, p.of, pair, lane / 4 + 8 * i);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = top + (warp / kBlockPairs * kTiles + tile) * 8 + lane % 4 * 2 + c % 2;
      const int i = lane / 4 + c / 2 * 8;
      if (row >= p.rows) continue;
      finish<One>(p, p.target(row), pair, i, total[tile][0][c], total[tile][1][c], scales[c / 2], scales[2 + c / 2]);
    }
  }
}

template <int kTiles, template <int, bool> class Rows>
INGOT_DEVICE void many_rows(const Product& p, int top, unsigned char* shared, Neighbours<4>* tables) {
  Eight* stages = reinterpret_cast<Eight*>(shared);
  if (p.of.k % 8 == 0) {
    many_rows<kTiles, true, Rows>(p, top, stages, tables);
  } else {
    many_rows<kTiles, false, Rows>(p, top, stages, tables);
  }
}

// Sums of groups and of parts of K do not find registers for more than 64 rows: then one half comes after the other.
template <int kTiles, template <int, bool> class Rows>
INGOT_DEVICE void many_rows(const Product& p, unsigned char* shared, Neighbours<4>* tables) {
  const int begin = p.first(16 * kTiles);
  if constexpr (!Rows<1, true>::kGrouped || kTiles <= 4) {
    many_rows<kTiles, Rows>(p, begin, shared, tables);
  } else {
#pragma unroll 1
    for (int top = begin; top < min(begin + 16 * kTiles, p.rows); top += 64) {
      __syncthreads();  // nobody reads what the half before it left
      many_rows<4, Rows>(p, top, shared, tables);
    }
  }
}

#endif
