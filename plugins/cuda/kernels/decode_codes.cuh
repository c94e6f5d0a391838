// Decode over codes, whose rows are whole 16 bytes: they come to shared memory as they are, and a warp makes bf16 of
// them when it loads its fragments. No number is made twice, since no other warp sees the warp's tokens.
//
//   stage of a warp, of two: 16 tokens
//   ┌──────┬────────┬──────────────────┐
//   │ keys │ values │ scales of either │
//   └──────┴────────┴──────────────────┘
//
// Keys: a lane takes words with the codes of its dims; of each word, a neighbour takes the other half. Values: ldmatrix
// takes two neighbours of a token for one number, so that a lane gets two dims of two tokens: a number for each of two
// products.
// So one product has the even dims of 16, the other one the odd ones: see put_sums. As warps share nothing, no barrier
// of the block lies between tiles; and all of a warp's tokens lie in one block of the cache.
//
#pragma once

#include "decode_attention.cuh"

struct WarpCodes {
  static constexpr int kTokens = TileShape<1>::kWarpTokens, kStages = 2;
  static constexpr int kPieces = kHeadDim / 16, kCopies = kTokens * kPieces;  // of 16 codes: of a row, of all
  static constexpr int kStride = kPieces % 2 ? kHeadDim : kHeadDim + 16;      // bytes of a row: no conflicts of banks
  static constexpr int kValues = kTokens * kStride, kScales = 2 * kValues;    // where they begin in a stage
  static constexpr int kStage = kScales + 2 * kTokens * kScaleBytes;          // bytes
  static constexpr int kHead = kBlockTokens * (kHeadDim + kScaleBytes);       // of a KV head in a block

  // Where the warp's tokens lie in a block: the same in every tile, if blocks are no larger than tiles.
  static constexpr bool kSamePlace = TileShape<1>::kTile % kBlockTokens == 0;

  const Attention& at;
  int begin, end;  // tokens that are there
  int row;         // of the sequence's blocks, in the table
  int from, to;    // where the lane's first copy lies: at that place of the first block, and in a stage, in bytes
  int from_scale;  // likewise

  INGOT_DEVICE WarpCodes(const Attention& attention, const DecodeBlock& block, int own) : at(attention) {
    const int lane = threadIdx.x % kWarp, place = kSamePlace ? own % kBlockTokens : 0;
    begin = block.begin, end = block.end, row = block.item.sequence * at.table_width;
    from = block.kv_head * kHead + place * kHeadDim + lane * 16;
    from_scale = block.kv_head * kHead + kBlockTokens * kHeadDim + (place + lane % kTokens) * kScaleBytes;
    to = lane / kPieces * kStride + lane % kPieces * 16;
    hold(row), hold(from), hold(from_scale), hold(to);
  }

  // Where in a stage the lane's copies lie, one by one.
  INGOT_DEVICE int place_of(int number) const {
    if constexpr (kWarp % kPieces == 0) return to + number * (kWarp / kPieces) * kStride;
    const int i = number * kWarp + static_cast<int>(threadIdx.x % kWarp);
    return i / kPieces * kStride + i % kPieces * 16;
  }

  // Begins to copy the warp's tokens from position `first` on; those outside begin .. end - 1 become zeros: their block
  // may not be there any more, or not yet.
  INGOT_DEVICE void load(unsigned char* stage, int first) const {
    const int lane = threadIdx.x % kWarp, low = begin - first, high = end - first;
    const bool all = low <= 0 && high >= kTokens, some = low < kTokens && high > 0;
    const int place = kSamePlace ? 0 : static_cast<int>(static_cast<unsigned>(first) % kBlockTokens);
    const int block = some ? at.tables[row + static_cast<int>(static_cast<unsigned>(first) / kBlockTokens)] : 0;
    const int64_t of_block = static_cast<int64_t>(block) * (at.kv_heads * kHead);
    const int64_t begins = of_block + (from + place * kHeadDim);
    const Stored *from_keys = at.keys + begins, *from_values = at.values + begins;
    const auto copy = [&](int number, bool there) {
      if (kCopies % kWarp && number * kWarp + lane >= kCopies) return;
      unsigned char* to_keys = stage + place_of(number);
      copy_async(to_keys, from_keys + number * kWarp * 16, there);
      copy_async(to_keys + kValues, from_values + number * kWarp * 16, there);
    };
    const auto is_there = [&](int token) { return token >= low && token < high; };
    constexpr int kNumber = (kCopies + kWarp - 1) / kWarp;
    if (all) {
#pragma unroll
      for (int number = 0; number < kNumber; ++number) copy(number, true);
    } else {
#pragma unroll 1
      for (int number = 0; number < kNumber; ++number) copy(number, is_there((number * kWarp + lane) / kPieces));
    }
    const Stored* of_scales = (lane < kTokens ? at.keys : at.values) + (of_block + (from_scale + place * kScaleBytes));
    copy_word_async(stage + kScales + lane * kScaleBytes, of_scales, all || is_there(lane % kTokens));
  }

  // The scales of the lane's tokens: neighbours of either half of the 16.
  INGOT_DEVICE static void take_scales(TwoFloats (&to)[2], const unsigned char* scales) {
    const auto* pairs = reinterpret_cast<const TwoFloats*>(scales) + threadIdx.x % 4;
    to[0] = pairs[0], to[1] = pairs[4];
  }

  INGOT_DEVICE static void multiply(float (&scores)[2][4], const Kv* queries, const unsigned char* keys) {
    const int lane = threadIdx.x % kWarp;
    const unsigned char* words = keys + lane / 4 * kStride + lane % 4 / 2 * 4;
    const uint32_t which = lane % 2 ? Codes::kSecond : Codes::kFirst;
#pragma unroll
    for (int k = 0; k < kDimTiles; ++k) {
      const auto* first = reinterpret_cast<const uint32_t*>(words + k * 16);
      const auto* second = reinterpret_cast<const uint32_t*>(words + 8 * kStride + k * 16);
      const uint32_t of_tokens[2][2] = {{first[0], first[2]}, {second[0], second[2]}};
      uint32_t a[4];
      load_matrices(a, queries + (lane & 15) * ::kStride + k * 16 + (lane >> 4) * 8);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        multiply_add<Kv>(scores[n], a, Codes::two(of_tokens[n][0], which), Codes::two(of_tokens[n][1], which));
    }
  }

  // Adds the values of the 16 tokens, weighted.
  INGOT_DEVICE static void add(Tile<1>& tile, const uint32_t (&weights)[4], const unsigned char* values) {
    const int lane = threadIdx.x % kWarp;
    const unsigned char* of_lane = values + (lane & 15) * kStride;
#pragma unroll
    for (int d = 0; d < kDimTiles; d += 2) {
      uint32_t words[4];
      load_matrices_transposed(words, of_lane + (d + 1 < kDimTiles ? d * 16 + (lane >> 4) * 16 : d * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (d + i / 2 >= kDimTiles) break;
        const uint32_t low = words[i / 2 * 2], high = words[i / 2 * 2 + 1];
        multiply_add<Kv>(tile.sums[2 * d + i], weights, Codes::two_apart(low, i % 2), Codes::two_apart(high, i % 2));
      }
    }
  }

  // Of rows lane / 4 and + 8, of the first tokens, then of the others. kWild: a scale may be NaN or infinite, which
  // must not reach the weights of rows that do not see its token.
  template <bool kWild>
  INGOT_DEVICE static void make_weights(uint32_t (&weights)[4], const float (&scores)[2][4],
                                        const TwoFloats (&scales)[2]) {
    const auto share = [](float of_row, float scale) {
      return kWild ? scaled_share(of_row, scale) : of_row * (scale * kCodeUnit);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = pack_two<Kv>(share(scores[i / 2][i % 2 * 2], scales[i / 2].first),
                                share(scores[i / 2][i % 2 * 2 + 1], scales[i / 2].second));
    }
  }

  INGOT_DEVICE static void attend(Tile<1>& tile, const Kv* queries, const unsigned char* stage, const Attention& at,
                                  const Tile<1>::View& view) {
    float scores[2][4] = {};
    TwoFloats scales[2];
    multiply(scores, queries, stage);
    take_scales(scales, stage + kScales);
#pragma unroll
    for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] *= i % 2 ? scales[i / 4].second : scales[i / 4].first;
    tile.soften(scores, at, view);
    take_scales(scales, stage + kScales + kTokens * kScaleBytes);
    uint32_t weights[4];
    const float sum = scales[0].first + scales[0].second + scales[1].first + scales[1].second;
    if (__any_sync(kAllLanes, !(sum < -minus_infinity()))) {
      make_weights<true>(weights, scores, scales);
    } else {
      make_weights<false>(weights, scores, scales);
    }
    add(tile, weights, stage + kValues);
  }
};

INGOT_DEVICE void attend_codes(unsigned char* memory, const Attention& at) {
  constexpr int kTile = TileShape<1>::kTile, kStages = WarpCodes::kStages;
  const DecodeBlock block(at);
  if (block.begin_tile == block.end_tile) return;
  const int warp = threadIdx.x / kWarp, own = warp * WarpCodes::kTokens;
  Kv* queries = reinterpret_cast<Kv*>(memory);
  unsigned char* codes = reinterpret_cast<unsigned char*>(queries + TileShape<1>::kRows * kStride);
  unsigned char* stages = codes + warp * kStages * WarpCodes::kStage;
  const WarpCodes loader(at, block, own);
  const auto stage = [&](unsigned index) { return stages + index % kStages * WarpCodes::kStage; };
  const auto load = [&](int index) {
    if (index < block.end_tile) loader.load(stage(index), index * kTile + own);
    copy_commit();
  };
  load(block.begin_tile);  // on its way while the queries come
  block.take_queries(queries, at);
  Tile<1> tile;
  int positions[2];
  tile.begin(positions, at, block.item, block.kv_head);
  __syncthreads();  // the queries are here
  for (int index = block.begin_tile; index < block.end_tile; ++index) {
    load(index + 1);
    copy_wait<kStages - 1>();
    __syncwarp();  // what the warp's other lanes have copied is here, too
    WarpCodes::attend(tile, queries, stage(index), at, Tile<1>::View(at, block.item, index * kTile + own, positions));
    __syncwarp();  // all lanes are done with the stage
  }
  copy_wait<0>();
  tile.finish();
  __syncthreads();  // all warps are done with theirs
  merge_warps(tile, reinterpret_cast<float*>(codes), at, block.item, block.rows, block.kv_head);
}
