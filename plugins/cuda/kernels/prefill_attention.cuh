// Attention of prompts over a 16-bit cache: tiles of 128 query rows (64 for heads of more than 128 dims).
//
//   ┌────────┐
//   │ warp 0 │  32 rows x kTile tokens: each fragment of K and V is read from shared memory once for both halves of 16
//   │ warp 1 │
//   └────────┘ ...
//
// Weights are exp2(score * kLog2e * scale - base). The base of a row is the highest score of the tokens in which it was
// last chosen; it is chosen anew only once weights grow beyond kHighest, which sums in float32 and weights in 16 bits
// bear. So the usual 16 tokens take one multiplication, one exp2 and one addition for each score, and no maximum; and
// the weight of a row's highest score is no 1, but rounded to 16 bits as all others. What a row gets does not depend on
// the other rows of its tile.
//
// Heads of at most 80 dims: queries in registers, scores of the next 16 tokens while those before are weighed, two
// stages of K and V, one barrier for each tile. Larger ones: queries in shared memory, scores of a whole tile, one
// stage of K and V each, of which V comes while K is read, and the next K while V is.
#pragma once

#include "prefill_pages.cuh"

struct PrefillShape {
  static constexpr int kThreads = 128;
  static constexpr bool kHeld = kPaddedDim <= 80;            // queries lie in registers
  static constexpr int kHalves = kPaddedDim <= 128 ? 2 : 1;  // times 16 rows of a warp
  static constexpr int kWarpRows = 16 * kHalves;
  static constexpr int kRows = 4 * kWarpRows;
  // Tokens. Scales of codes take registers, so that fewer scores may.
  static constexpr int kTile = kPaddedDim > (kScaled ? 80 : 192) ? 32 : 64;
  static constexpr int kStages = kHeld ? 2 : 1;
  static constexpr int kBlocks =
      kPaddedDim <= 64 && !kScaled ? 3 : 2;       // of a multiprocessor, that registers shall allow
  static constexpr int kStride = kPaddedDim + 8;  // elements of a row in shared memory: no conflicts of banks
  static constexpr int kStage = kTile * kStride;
  // For the scales of how many tiles there is room. Where codes come ahead, those of a tile are used while the scales
  // of the tile after the next one come.
  static constexpr int kScaleTiles = kCodesAhead ? 4 : kStages;
};

// What a block of prefill computes: all heads of the first item first, which has most to do. An item that other heads
// of the model take whole may be more than a tile of these: it has parts, which are dimensions of the grid too, and
// the last of which may have no rows.
struct PrefillBlock {
  int item, part, kv_head;

  INGOT_DEVICE explicit PrefillBlock(int kv_heads) {
    const int linear = blockIdx.y * gridDim.x + blockIdx.x, parts = gridDim.y / kv_heads, each = linear / kv_heads;
    item = each / parts, part = parts - 1 - each % parts, kv_head = linear % kv_heads;
  }
};

// Two numbers of one row of q, as the matrix units take them; zeros behind its dims, and for no row.
INGOT_DEVICE uint32_t two_queries(const float* row, int dim, bool valid) {
  if constexpr (kHeadDim % 2 == 0) {
    const bool some = valid && dim < kHeadDim;
    const TwoFloats two = some ? *reinterpret_cast<const TwoFloats*>(row + dim) : TwoFloats{0.f, 0.f};
    return pack_two<Kv>(two.first * kCodeUnit, two.second * kCodeUnit);
  } else {
    return pack_two<Kv>(valid && dim < kHeadDim ? row[dim] * kCodeUnit : 0.f,
                        valid && dim + 1 < kHeadDim ? row[dim + 1] * kCodeUnit : 0.f);
  }
}

// A warp's rows: lane i holds rows i / 4 and i / 4 + 8 of each half.
struct PrefillRows {
  using Shape = PrefillShape;
  static constexpr int kHalves = Shape::kHalves, kStride = Shape::kStride, kDimTiles = kPaddedDim / 16;
  static constexpr float kHighest = 1024.f;  // of the weights of a lane's four scores of a row, together
  static constexpr float kNoBase = 1e30f;    // nothing was seen yet; -infinity would make NaN
  using Scores = float[kHalves][2][4];       // of 16 tokens: of a half, 8 tokens, rows i / 4 and i / 4 + 8
  using Weights = uint32_t[kHalves][4];      // of 16 tokens, as the matrix units take them
  using Positions = int[kHalves][2];         // of the tokens of a lane's rows

  float sums[kHalves][2 * kDimTiles][4];  // dims 8 * i + 2 * (lane % 4) and the next
  float weight[kHalves][2];
  float base[kHalves][2];  // times -1
  uint32_t held[Shape::kHeld ? kHalves : 1][Shape::kHeld ? kDimTiles : 1][4];
  const Kv* queries;  // of the tile, where they are not held
  float scale;        // of scores: to powers of two

  INGOT_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[m][i][c] = 0.f;
      }
      weight[m][0] = weight[m][1] = 0.f;
      base[m][0] = base[m][1] = kNoBase;
    }
  }

  // Of the item's rows; a thread's come from thread_anew, so that what is computed of them is not kept for later
  // either.
  INGOT_DEVICE static int first_row(unsigned thread) { return thread / kWarp * Shape::kWarpRows; }
  INGOT_DEVICE static int row(unsigned thread, int m, int side) {
    return first_row(thread) + m * 16 + thread % kWarp / 4 + 8 * side;
  }

  INGOT_DEVICE void take_queries(Kv* shared, const Attention& at, const Item& item, int kv_head) {
    const unsigned thread = thread_anew();
    const int rows = item.count * (at.heads / at.kv_heads);
    if constexpr (Shape::kHeld) {
#pragma unroll
      for (int m = 0; m < kHalves; ++m) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int from_row = row(thread, m, side);
          const bool valid = from_row < rows;
          const float* from = at.q + at.place(item, valid ? from_row : 0, kv_head) * kHeadDim;
#pragma unroll
          for (int k = 0; k < 2 * kDimTiles; ++k) {
            held[m][k / 2][side + k % 2 * 2] = two_queries(from, k * 8 + thread % 4 * 2, valid);
          }
        }
      }
    } else {
      constexpr int kPairs = kPaddedDim / 2;
#pragma unroll 8
      for (unsigned i = thread; i < Shape::kRows * kPairs; i += Shape::kThreads) {
        const int to = i / kPairs, dim = i % kPairs * 2;
        const float* from = at.q + at.place(item, to < rows ? to : 0, kv_head) * kHeadDim;
        *reinterpret_cast<uint32_t*>(shared + to * kStride + dim) = two_queries(from, dim, to < rows);
      }
      queries = shared;
    }
  }

  // Where a lane reads fragments of keys, and of values. Computed for each tile: registers are rarer than instructions.
  INGOT_DEVICE static int in_keys() {
    const unsigned lane = thread_anew() % kWarp;
    return ((lane & 7) + (lane >> 4) * 8) * kStride + ((lane >> 3) & 1) * 8;
  }
  INGOT_DEVICE static int in_values() {
    const unsigned lane = thread_anew() % kWarp;
    return (lane & 15) * kStride + (lane >> 4) * 8;
  }

  // The scores of kTokens tokens. keys: the first of them, at the lane's place; scales: theirs, behind codes.
  template <int kTokens>
  INGOT_DEVICE void multiply(Scores (&scores)[kTokens / 16], const Kv* keys, const float* scales) const {
    const Kv* of_lane = queries + first_row(thread_anew()) * kStride + in_values();
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
#pragma unroll
      for (int m = 0; m < kHalves; ++m) {
#pragma unroll
        for (int c = 0; c < 8; ++c) scores[n][m][c / 4][c % 4] = 0.f;
      }
    }
#pragma unroll
    for (int k = 0; k < kDimTiles; ++k) {
      uint32_t a[kHalves][4];
#pragma unroll
      for (int m = 0; m < kHalves; ++m) {
        if constexpr (Shape::kHeld) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = held[m][k][i];
        } else {
          load_matrices(a[m], of_lane + m * 16 * kStride + k * 16);
        }
      }
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys + n * 16 * kStride + k * 16);
#pragma unroll
        for (int m = 0; m < kHalves; ++m) {
          multiply_add<Kv>(scores[n][m][0], a[m], b[0], b[1]);
          multiply_add<Kv>(scores[n][m][1], a[m], b[2], b[3]);
        }
      }
    }
    if constexpr (kScaled) {
      const unsigned thread = thread_anew();
#pragma unroll
      for (int c = 0; c < kTokens / 4; ++c) {
        const float of_token = scales[token(thread, c)];
#pragma unroll
        for (int m = 0; m < kHalves; ++m) {
          scores[c / 4][m][c / 2 % 2][c % 2] *= of_token, scores[c / 4][m][c / 2 % 2][2 + c % 2] *= of_token;
        }
      }
    }
  }

  // Caps, grows and biases the scores of kTokens tokens, where the model does; `first` is the position of the first.
  template <int kTokens>
  INGOT_DEVICE static void bend(Scores (&scores)[kTokens / 16], const Attention& at, const Positions& positions,
                                int first, int kv_head) {
    const unsigned thread = thread_anew();
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int last = positions[m][side];
        const float grown = at.scale_at(last);
        const auto each = [&](auto change) {
#pragma unroll
          for (int c = 0; c < kTokens / 4; ++c)
            change(scores[c / 4][m][c / 2 % 2][2 * side + c % 2], first + token(thread, c));
        };
        each([&](float& score, int) { score *= grown; });
        if (at.softcap > 0.f) {  // softcap * tanh(score / softcap)
          const float twice = 2.f * at.softcap, stretch = 2.f * kLog2e * fast_reciprocal(at.softcap);
          each([&](float& score, int) {
            score = at.softcap - twice * fast_reciprocal(1.f + fast_exp2(score * stretch));
          });
        }
        if (at.slopes) {
          const float slope = at.slopes[at.head(row(thread, m, side), kv_head)];
          each([&](float& score, int position) { score += at.bias(slope, last, position); });
        }
      }
    }
  }

  // Which token of a row's the lane holds at place c.
  INGOT_DEVICE static int token(unsigned thread, int c) { return c / 2 * 8 + thread % 4 * 2 + c % 2; }

  // Tokens that a row does not see get no weight.
  template <int kTokens>
  INGOT_DEVICE static void hide(Scores (&scores)[kTokens / 16], const Attention& at, const Positions& positions,
                                int first) {
    const unsigned thread = thread_anew();
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int end = positions[m][side] - first, begin = at.first_visible(positions[m][side]) - first;
#pragma unroll
        for (int c = 0; c < kTokens / 4; ++c) {
          if (token(thread, c) > end || token(thread, c) < begin)
            scores[c / 4][m][c / 2 % 2][2 * side + c % 2] = minus_infinity();
        }
      }
    }
  }

  // scales: of the tokens' values, behind codes.
  INGOT_DEVICE void exponents(Weights& weights, float (&added)[kHalves][2], const Scores& scores,
                              const float* scales) const {
    float of_tokens[4] = {1.f, 1.f, 1.f, 1.f};
    if constexpr (kScaled) {
      const unsigned thread = thread_anew();
#pragma unroll
      for (int c = 0; c < 4; ++c) of_tokens[c] = scales[token(thread, c)];
    }
    make_weights<false>(weights, added, scores, of_tokens);
    if constexpr (kScaled) {
      const float sum = (of_tokens[0] + of_tokens[1]) + (of_tokens[2] + of_tokens[3]);
      if (__any_sync(kAllLanes, !(sum < -minus_infinity()))) make_weights<true>(weights, added, scores, of_tokens);
    }
  }

  // kWild: a scale may be NaN or infinite, which must not reach the weights of rows that do not see its token.
  template <bool kWild>
  INGOT_DEVICE void make_weights(Weights& weights, float (&added)[kHalves][2], const Scores& scores,
                                 const float (&scales)[4]) const {
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float each[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          each[c] = fast_exp2(fmaf(scores[m][c / 2][2 * side + c % 2], scale, base[m][side]));
        }
        added[m][side] = (each[0] + each[1]) + (each[2] + each[3]);
        if constexpr (kScaled) {
#pragma unroll
          for (int c = 0; c < 4; ++c)
            each[c] = kWild ? scaled_share(each[c], scales[c]) : each[c] * (scales[c] * kCodeUnit);
        }
        weights[m][side] = pack_two<Kv>(each[0], each[1]);
        weights[m][side + 2] = pack_two<Kv>(each[2], each[3]);
      }
    }
  }

  // Chooses the base anew for rows whose weights became too large; sums so far are rescaled.
  INGOT_DEVICE void choose_base(const Scores& scores, float (&added)[kHalves][2]) {
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
      float factors[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const auto of_row = [](float value) {  // the highest of the four lanes that share it
          value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
          return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
        };
        const int c = 2 * side;
        const float highest = of_row(fmaxf(fmaxf(scores[m][0][c], scores[m][0][c + 1]),  //
                                           fmaxf(scores[m][1][c], scores[m][1][c + 1])));
        const float chosen = of_row(added[m][side]) > kHighest ? -(highest * scale) : base[m][side];
        factors[side] = fast_exp2(chosen - base[m][side]);
        base[m][side] = chosen;
        weight[m][side] *= factors[side];
      }
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[m][i][c] *= factors[c / 2];
      }
    }
  }

  // again: makes the scores anew, where no registers shall hold them until it is known that their base is good.
  template <class Again>
  INGOT_DEVICE void weigh(Weights& weights, Scores& scores, const float* scales, Again again) {
    float added[kHalves][2], highest = 0.f;
    exponents(weights, added, scores, scales);
#pragma unroll
    for (int m = 0; m < kHalves; ++m) highest = fmaxf(highest, fmaxf(added[m][0], added[m][1]));
    if (__any_sync(kAllLanes, highest > kHighest)) {
      again();
      choose_base(scores, added);
      exponents(weights, added, scores, scales);
    }
#pragma unroll
    for (int m = 0; m < kHalves; ++m) weight[m][0] += added[m][0], weight[m][1] += added[m][1];
  }

  // Adds the weighted values of 16 tokens. values: the first of them, at the lane's place.
  INGOT_DEVICE void add(const Weights& weights, const Kv* values) {
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
      uint32_t b[4];
      load_matrices_transposed(b, values + d * 16);
#pragma unroll
      for (int m = 0; m < kHalves; ++m) {
        multiply_add<Kv>(sums[m][2 * d], weights[m], b[0], b[1]);
        multiply_add<Kv>(sums[m][2 * d + 1], weights[m], b[2], b[3]);
      }
    }
  }

  INGOT_DEVICE void write(const Attention& at, const Item& item, int kv_head) {
    const unsigned thread = thread_anew();
    const int pair = thread % 4, rows = item.count * (at.heads / at.kv_heads);
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float whole = weight[m][side];
        whole += __shfl_xor_sync(kAllLanes, whole, 1);
        whole += __shfl_xor_sync(kAllLanes, whole, 2);
        const int from = row(thread, m, side);
        if (from >= rows) continue;
        if (at.sinks) whole += fast_exp2(fmaf(at.sinks[at.head(from, kv_head)], kLog2e, base[m][side]));
        const float share = 1.f / whole;
        const int64_t to = at.place(item, from, kv_head) * kHeadDim;
#pragma unroll
        for (int i = 0; i < 2 * kDimTiles; ++i) {
          const int dim = i * 8 + 2 * pair;
          const float first = sums[m][i][2 * side] * share, second = sums[m][i][2 * side + 1] * share;
          if (kHeadDim % 2 == 0 && dim < kHeadDim) {
            store_two_activations(at.y, to + dim, first, second, at.narrow);
          } else {
            if (dim < kHeadDim) store_activation(at.y, to + dim, first, at.narrow);
            if (dim + 1 < kHeadDim) store_activation(at.y, to + dim + 1, second, at.narrow);
          }
        }
      }
    }
  }
};

// Whether scores take more than a scale.
INGOT_DEVICE bool bends(const Attention& at) { return at.softcap > 0.f || at.slopes || at.growth > 0.f; }

// What a warp sees of the tiles that its block goes through.
struct PrefillView {
  using Shape = PrefillShape;
  int low, high;  // positions of the tokens of its first and its last row; high is -1 without rows
  PrefillRows::Positions positions;

  INGOT_DEVICE PrefillView(const Attention& at, const Item& item) {
    const unsigned thread = thread_anew();
    const int first = PrefillRows::first_row(thread);
    low = position(at, item, first);
    high = first < item.count * (at.heads / at.kv_heads) ? position(at, item, first + Shape::kWarpRows - 1) : -1;
#pragma unroll
    for (int m = 0; m < Shape::kHalves; ++m) {
#pragma unroll
      for (int side = 0; side < 2; ++side) positions[m][side] = position(at, item, PrefillRows::row(thread, m, side));
    }
  }

  // Rows that the item does not have see what its last one sees.
  INGOT_DEVICE static int position(const Attention& at, const Item& item, int row) {
    return item.position + min(row / (at.heads / at.kv_heads), item.count - 1);
  }
  // Whether some row sees some of the tokens first .. first + count - 1.
  INGOT_DEVICE bool some(const Attention& at, int first, int count) const {
    return first <= high && first + count > at.first_visible(low);
  }
  // Whether every row sees all of them.
  INGOT_DEVICE bool all(const Attention& at, int first, int count) const {
    return first + count - 1 <= low && first >= at.first_visible(high);
  }
};

INGOT_DEVICE void find_plain_tiles(PrefillWork& work, const Attention& at) {
  constexpr int kTile = PrefillShape::kTile;
  const PrefillView view(at, work.item);
  if (threadIdx.x % kWarp) return;
  work.plain[threadIdx.x / kWarp][0] = (at.first_visible(view.high) + kTile - 1) / kTile;
  work.plain[threadIdx.x / kWarp][1] = bends(at) || view.high < 0 ? 0 : (view.low + 1) / kTile;
}
INGOT_DEVICE bool is_plain(const PrefillWork& work, int tile) {
  const unsigned warp = thread_anew() / kWarp;
  return tile >= work.plain[warp][0] && tile < work.plain[warp][1];
}

// A tile, whose keys and values begin at the places of the lane.
INGOT_DEVICE void attend_held(PrefillRows& rows, bool plain, const Kv* keys, const Kv* values, const float* scales,
                              const Attention& at, const PrefillWork& work, int tile) {
  const float *key_scales = scales, *value_scales = scales + PrefillShape::kTile;
  constexpr int kChunks = PrefillShape::kTile / 16, kStep = 16 * PrefillShape::kStride;
  PrefillRows::Weights weights;
  if (plain) {
    PrefillRows::Scores scores[2][1];
    rows.multiply<16>(scores[0], keys, key_scales);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float *of_keys = key_scales + 16 * c, *of_values = value_scales + 16 * c;
      if (c + 1 < kChunks) rows.multiply<16>(scores[(c + 1) % 2], keys + (c + 1) * kStep, of_keys + 16);
      rows.weigh(weights, scores[c % 2][0], of_values,
                 [&] { rows.multiply<16>(scores[c % 2], keys + c * kStep, of_keys); });
      rows.add(weights, values + c * kStep);
    }
    return;
  }
  const PrefillView view(at, work.item);
#pragma unroll 1
  for (int c = 0; c < kChunks; ++c) {
    const int from = tile * PrefillShape::kTile + 16 * c;
    if (!view.some(at, from, 16)) continue;
    PrefillRows::Scores scores[1];
    rows.multiply<16>(scores, keys + c * kStep, key_scales + 16 * c);
    if (bends(at)) rows.bend<16>(scores, at, view.positions, from, work.kv_head);
    if (!view.all(at, from, 16)) rows.hide<16>(scores, at, view.positions, from);
    rows.weigh(weights, scores[0], value_scales + 16 * c, [] {});
    rows.add(weights, values + c * kStep);
  }
}

INGOT_DEVICE void attend_prompt(unsigned char* memory, PrefillWork& work, const Attention& at) {
  using Shape = PrefillShape;
  if (threadIdx.x == 0) {
    const PrefillBlock block(at.kv_heads);
    const Item whole = at.items[block.item];
    const int tokens = Shape::kRows / (at.heads / at.kv_heads), before = block.part * tokens;
    const Item item{whole.sequence, whole.token + before, min(whole.count - before, tokens), whole.position + before};
    const int* table = at.tables + static_cast<int64_t>(item.sequence) * at.table_width;
    work.item = item, work.table = table, work.kv_head = block.kv_head;
    work.begin = at.first_visible(item.position), work.end = item.position + item.count;
  }
  Kv* queries = reinterpret_cast<Kv*>(memory);
  Kv* keys = queries + (Shape::kHeld ? 0 : Shape::kRows * Shape::kStride);
  Kv* values = keys + Shape::kStages * Shape::kStage;
  float* scales = reinterpret_cast<float*>(values + Shape::kStages * Shape::kStage);
  if constexpr (kHeadDim < kPaddedDim) {  // K and V lie one behind the other
    constexpr int kPad = kHeadDim < kPaddedDim ? kPaddedDim - kHeadDim : 1;
    for (int i = threadIdx.x; i < 2 * Shape::kStages * Shape::kTile * kPad; i += Shape::kThreads) {
      keys[i / kPad * Shape::kStride + kHeadDim + i % kPad] = Kv{0};
    }
  }

  __syncthreads();  // the work is known
  if (work.item.count <= 0) return;
  const int begin_tile = work.begin / Shape::kTile;
  const Pages<Shape, kCodesAhead> pages{at, work, scales};
  const auto stage = [](unsigned tile) { return static_cast<int>(tile % Shape::kStages) * Shape::kStage; };
  pages.begin<true, Shape::kStages == 2>(keys + stage(begin_tile), values + stage(begin_tile), begin_tile);

  PrefillRows rows;
  rows.clear();
  rows.scale = bends(at) ? kLog2e : at.scale * kLog2e;
  rows.take_queries(queries, at, work.item, work.kv_head);
  find_plain_tiles(work, at);
  pages.finish_first<true, Shape::kStages == 2>(keys + stage(begin_tile), values + stage(begin_tile), begin_tile);
  if constexpr (Shape::kStages == 2) {
    for (int tile = begin_tile; tile * Shape::kTile < work.end; ++tile) {
      pages.wait();
      __syncthreads();  // the tile is here, and everybody is done with the one before
      const int next = tile + 1;
      if (next * Shape::kTile < work.end) {
        pages.load<true, true>(keys + stage(next), values + stage(next), next);
      }
      copy_commit();
      attend_held(rows, is_plain(work, tile), keys + stage(tile) + rows.in_keys(),
                  values + stage(tile) + rows.in_values(), pages.of_scales(tile), at, work, tile);
    }
  } else {
    for (int tile = begin_tile; tile * Shape::kTile < work.end; ++tile) {
      constexpr int kChunks = Shape::kTile / 16;
      const int first = tile * Shape::kTile;
      PrefillRows::Scores scores[kChunks];
      pages.wait();
      __syncthreads();  // the keys are here, and everybody is done with the values before
      const bool all = is_plain(work, tile), some = all || PrefillView(at, work.item).some(at, first, Shape::kTile);
      pages.load<false, true>(keys, values, tile);
      copy_commit();
      if (some) rows.multiply<Shape::kTile>(scores, keys + rows.in_keys(), pages.of_scales(tile));
      pages.wait();
      __syncthreads();  // the values are here, and everybody is done with the keys
      if ((tile + 1) * Shape::kTile < work.end) {
        pages.load<true, false>(keys, values, tile + 1);
      }
      copy_commit();
      if (!some) continue;
      if (!all) {
        const PrefillView view(at, work.item);
        if (bends(at)) rows.bend<Shape::kTile>(scores, at, view.positions, first, work.kv_head);
        rows.hide<Shape::kTile>(scores, at, view.positions, first);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        PrefillRows::Weights weights;
        rows.weigh(weights, scores[c], pages.of_scales(tile) + Shape::kTile + 16 * c, [] {});
        rows.add(weights, values + rows.in_values() + c * 16 * Shape::kStride);
        __syncwarp();  // for the compiler, which else fetches more values than there are registers
      }
    }
  }
  rows.write(at, work.item, work.kv_head);
}
