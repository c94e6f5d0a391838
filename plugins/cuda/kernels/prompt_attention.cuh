// Attention of prompts over a 16-bit cache on sm_90a: tiles of 128 query rows, two warpgroups that multiply and one
// that copies.
//
//   warpgroup 0   K and V of each tile of tokens ─▶ stages in shared memory;  queries of the next piece of work
//   warpgroup 1   rows  0 ..  63 ┐ scores = Q K^T;  weights of them, while sums += weights V of the tile before goes on
//   warpgroup 2   rows 64 .. 127 ┘ and the other warpgroup multiplies
//
// A block goes through several pieces of work, so that what the next one needs is there when one ends. Weights and
// their base are those of prefill_attention.cuh, with a base for a tile of tokens instead of 16 of them. A tile begins
// at a multiple of its length, so that a row gets the same whatever chunk it is in.
#pragma once

#include "matrix_units.cuh"
#include "paged_attention.cuh"
#include "signals.cuh"
#include "wgmma.cuh"

struct PromptShape {
  static constexpr int kConsumers = 2, kRows = 64 * kConsumers, kThreads = kGroup * (kConsumers + 1);
  static constexpr int kTile = kPaddedDim > 64 ? 64 : 128;  // tokens
  static constexpr int kStages = 4;                         // of K, and of V
  static constexpr int kPanels = (kPaddedDim + 63) / 64;
  static constexpr int kPanelBytes = kTile * kWideLine, kStageBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = kRows * kWideLine, kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kCopierRegisters = 56, kRegisters = 224;  // of a thread: 65,536 of a multiprocessor
};

struct PromptWork {
  Item item;
  int kv_head;
  int begin, end;  // tokens that some row sees
};

struct PromptSignals {
  Signal queries_there[2], queries_done[2];
  Signal keys_there[PromptShape::kStages], keys_done[PromptShape::kStages];
  Signal values_there[PromptShape::kStages], values_done[PromptShape::kStages];
  PromptWork work[2];
};

// A use of a ring of stages.
template <int kStages>
struct Ring {
  unsigned count = 0;
  INGOT_DEVICE int stage() const { return static_cast<int>(count % kStages); }
  INGOT_DEVICE unsigned parity() const { return count / kStages % 2; }
};

// The pieces of work of a block: every gridDim.x-th, forwards and backwards in turn, so that all blocks have about as
// much to do where pieces come longest first.
struct PromptPieces {
  int count, round = 0;
  INGOT_DEVICE explicit PromptPieces(int pieces) : count(pieces) {}
  INGOT_DEVICE int next() {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int piece = round * blocks + (round % 2 ? blocks - 1 - block : block);
    round += 1;
    return piece;
  }
};

struct PromptCopier {
  using Shape = PromptShape;
  static constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kGroup / kChunks;

  const Attention& at;
  unsigned char* memory;
  PromptSignals& signals;

  // Pages that share a tile, and the block of each; those of tokens that no row sees are not looked at.
  static constexpr int kPage = kBlockTokens < Shape::kTile ? kBlockTokens : Shape::kTile;
  static constexpr int kPages = Shape::kTile / kPage;
  static constexpr bool kTileInPage = kBlockTokens > Shape::kTile;
  static_assert(kPage % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0 && kGroup % kChunks == 0);
  static_assert(Shape::kTile % kPage == 0 && kBlockTokens % kPage == 0);
  using Blocks = int[kPages];
  INGOT_DEVICE static void find(Blocks& blocks, const PromptWork& work, const int* table, int tile) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int position = tile * Shape::kTile + i * kPage;
      const bool some = position < work.end && position + kPage > work.begin;
      blocks[i] = some ? table[static_cast<unsigned>(position) / kBlockTokens] : 0;
    }
  }
  INGOT_DEVICE void load(unsigned char* to, const Stored* pool, int dim, const PromptWork& work, const Blocks& blocks,
                         int tile) const {
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x % kGroup / kChunks;
    unsigned char* lane = to + chunk / 8 * Shape::kPanelBytes + wide_place(first, chunk % 8);
    const int numbers = at.kv_heads * kBlockTokens * dim;  // of a block
    const int from_first = (work.kv_head * kBlockTokens + first) * dim + chunk * 8;
    const int begin = tile * Shape::kTile;
    const bool all = begin >= work.begin && begin + Shape::kTile <= work.end;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const Stored* from = pool + (static_cast<int64_t>(blocks[i]) * numbers + from_first);
      if constexpr (kTileInPage) from += static_cast<unsigned>(begin) % kBlockTokens * dim;
#pragma unroll
      for (int row = 0; row < kPage; row += kRowsAtOnce) {
        const int position = begin + i * kPage + row + first;
        copy_async(lane + (i * kPage + row) * kWideLine, from + row * dim,
                   all || (position >= work.begin && position < work.end));
      }
    }
  }
  INGOT_DEVICE void load_queries(unsigned char* to, const PromptWork& work) const {
    const int rows = work.item.count * (at.heads / at.kv_heads);
    const int chunk = threadIdx.x % kChunks, first = threadIdx.x % kGroup / kChunks;
    unsigned char* panel = to + chunk / 8 * Shape::kQueryPanelBytes;
#pragma unroll 2
    for (int row = first; row < Shape::kRows; row += kRowsAtOnce) {
      const bool valid = row < rows;
      const float* from = at.q + at.place(work.item, valid ? row : 0, work.kv_head) * kHeadDim + chunk * 8;
      Four<float> low = load_four(from), high = load_four(from + 4);
      if (!valid) low = high = Four<float>{};
      struct alignas(16) Words {
        uint32_t at[4];
      };
      *reinterpret_cast<Words*>(panel + wide_place(row, chunk % 8)) =
          Words{{pack_two<Kv>(low.at[0], low.at[1]), pack_two<Kv>(low.at[2], low.at[3]),
                 pack_two<Kv>(high.at[0], high.at[1]), pack_two<Kv>(high.at[2], high.at[3])}};
    }
  }

  INGOT_DEVICE PromptWork work_of(int piece, int parts) const {
    const int each = piece / at.kv_heads, part = parts - 1 - each % parts;
    const Item whole = at.items[each / parts];
    const int tokens = Shape::kRows / (at.heads / at.kv_heads), before = part * tokens;
    const Item item{whole.sequence, whole.token + before, min(whole.count - before, tokens), whole.position + before};
    return {item, piece % at.kv_heads, at.first_visible(item.position), item.position + item.count};
  }

  INGOT_DEVICE void copy(int pieces, int parts) const {
    unsigned char* keys = memory + 2 * Shape::kQueryBytes;
    unsigned char* values = keys + Shape::kStages * Shape::kStageBytes;
    Ring<2> query;
    Ring<Shape::kStages> ring;
    PromptPieces mine(pieces);
    for (int piece = mine.next(); piece < pieces; piece = mine.next(), ++query.count) {
      const PromptWork work = work_of(piece, parts);
      const int stage = query.stage();
      signal_wait(&signals.queries_done[stage], query.parity() ^ 1);
      if (work.item.count > 0) load_queries(memory + stage * Shape::kQueryBytes, work);
      if (threadIdx.x % kGroup == 0) signals.work[stage] = work;
      let_units_see();
      signal_arrive(&signals.queries_there[stage]);
      if (work.item.count <= 0) continue;
      const int* table = at.tables + static_cast<int64_t>(work.item.sequence) * at.table_width;
      Blocks blocks;
      find(blocks, work, table, work.begin / Shape::kTile);
      for (int tile = work.begin / Shape::kTile; tile * Shape::kTile < work.end; ++tile, ++ring.count) {
        Blocks next;
        find(next, work, table, tile + 1);
        const int at_stage = ring.stage();
        signal_wait(&signals.keys_done[at_stage], ring.parity() ^ 1);
        load(keys + at_stage * Shape::kStageBytes, at.keys, kHeadDim, work, blocks, tile);
        signal_arrive_behind_copies(&signals.keys_there[at_stage]);
        signal_wait(&signals.values_done[at_stage], ring.parity() ^ 1);
        load(values + at_stage * Shape::kStageBytes, at.values, kPaddedDim, work, blocks, tile);
        signal_arrive_behind_copies(&signals.values_there[at_stage]);
#pragma unroll
        for (int i = 0; i < kPages; ++i) blocks[i] = next[i];
      }
    }
  }
};

// Rows of a warpgroup: lane i of a warp holds rows 16 * warp + i / 4, and + 8.
struct PromptRows {
  using Shape = PromptShape;
  static constexpr int kScores = Shape::kTile / 2, kChunks = Shape::kTile / 16;
  static constexpr float kHighest = 1024.f;  // of the weights of a lane's scores of a row, together
  static constexpr float kNoBase = 1e30f;    // nothing was seen yet; -infinity would make NaN
  using Weights = uint32_t[kChunks][4];

  float sums[kPaddedDim / 2];
  float scores[kScores];  // token 8 * (i / 4) + 2 * (lane % 4) + i % 2, row side i / 2 % 2
  float weight[2];
  float base[2];  // times -1
  float scale;    // of scores: to powers of two

  INGOT_DEVICE static int token(unsigned thread, int i) { return i / 4 * 8 + static_cast<int>(thread % 4) * 2 + i % 2; }
  INGOT_DEVICE static constexpr int side(int i) { return i / 2 % 2; }

  INGOT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kPaddedDim / 2; ++i) sums[i] = 0.f;
    weight[0] = weight[1] = 0.f;
    base[0] = base[1] = kNoBase;
  }

  INGOT_DEVICE void multiply(const unsigned char* queries, const unsigned char* keys) {
#pragma unroll
    for (int k = 0; k < kPaddedDim / 16; ++k) {
      group_multiply<Kv, Shape::kTile>(scores, describe_rows(queries + k / 4 * Shape::kQueryPanelBytes, k % 4),
                                       describe_rows(keys + k / 4 * Shape::kPanelBytes, k % 4), k > 0);
    }
  }
  INGOT_DEVICE void add(const Weights& weights, const unsigned char* values) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      group_multiply<Kv, kPaddedDim, true>(sums, weights[c], describe_columns(values, Shape::kPanelBytes, c));
    }
  }

  // Caps, grows and biases the scores of a tile, where the model does; first: the position of its first token; rows: of
  // the lane in the tile.
  INGOT_DEVICE void bend(const Attention& at, int first, int kv_head, int row, const int (&positions)[2]) {
    const unsigned thread = thread_anew();
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int last = positions[s];
      const float grown = at.scale_at(last);
      const auto each = [&](auto change) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          if (side(i) == s) change(scores[i], first + token(thread, i));
        }
      };
      each([&](float& score, int) { score *= grown; });
      if (at.softcap > 0.f) {  // softcap * tanh(score / softcap)
        const float twice = 2.f * at.softcap, stretch = 2.f * kLog2e * fast_reciprocal(at.softcap);
        each(
            [&](float& score, int) { score = at.softcap - twice * fast_reciprocal(1.f + fast_exp2(score * stretch)); });
      }
      if (at.slopes) {
        const float slope = at.slopes[at.head(row + 8 * s, kv_head)];
        each([&](float& score, int position) { score += at.bias(slope, last, position); });
      }
    }
  }

  // Tokens that a row does not see get no weight.
  INGOT_DEVICE void hide(const Attention& at, int first, const int (&positions)[2]) {
    const unsigned thread = thread_anew();
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int end = positions[s] - first, begin = at.first_visible(positions[s]) - first;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (side(i) == s && (token(thread, i) > end || token(thread, i) < begin)) scores[i] = minus_infinity();
      }
    }
  }

  INGOT_DEVICE void exponents(Weights& weights, float (&added)[2]) const {
    float parts[2][2] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 8 * c; i < 8 * c + 8; i += 2) {
        const float first = fast_exp2(fmaf(scores[i], scale, base[side(i)]));
        const float second = fast_exp2(fmaf(scores[i + 1], scale, base[side(i)]));
        parts[side(i)][0] += first, parts[side(i)][1] += second;
        weights[c][i % 8 / 2] = pack_two<Kv>(first, second);
      }
    }
    added[0] = parts[0][0] + parts[0][1], added[1] = parts[1][0] + parts[1][1];
  }

  // Chooses the base anew for rows whose weights are too large; sums so far are rescaled.
  INGOT_DEVICE void choose_base(const float (&added)[2]) {
    float factors[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const auto of_row = [](float value) {  // the highest of the four lanes that share it
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
        return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
      };
      float highest = minus_infinity();
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (side(i) == s) highest = fmaxf(highest, scores[i]);
      }
      highest = of_row(highest);
      const bool anew = of_row(added[s]) > kHighest && highest > minus_infinity();
      const float chosen = anew ? -(highest * scale) : base[s];
      factors[s] = fast_exp2(chosen - base[s]);
      base[s] = chosen;
      weight[s] *= factors[s];
    }
#pragma unroll
    for (int i = 0; i < kPaddedDim / 2; ++i) sums[i] *= factors[side(i)];
  }

  INGOT_DEVICE void write(const Attention& at, const PromptWork& work, int first_row) {
    const int pair = threadIdx.x % 4, rows = work.item.count * (at.heads / at.kv_heads);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      float whole = weight[s];
      whole += __shfl_xor_sync(kAllLanes, whole, 1);
      whole += __shfl_xor_sync(kAllLanes, whole, 2);
      const int row = first_row + 8 * s;
      if (row >= rows) continue;
      if (at.sinks) whole += fast_exp2(fmaf(at.sinks[at.head(row, work.kv_head)], kLog2e, base[s]));
      const float share = 1.f / whole;
      const int64_t to = at.place(work.item, row, work.kv_head) * kHeadDim;
#pragma unroll
      for (int i = 0; i < kPaddedDim / 8; ++i) {
        const int dim = i * 8 + 2 * pair;
        if (dim < kHeadDim)
          store_two_activations(at.y, to + dim, sums[4 * i + 2 * s] * share, sums[4 * i + 2 * s + 1] * share,
                                at.narrow);
      }
    }
  }
};

template <bool kBends>
struct PromptReader {
  using Shape = PromptShape;
  const Attention& at;
  unsigned char* memory;
  PromptSignals& signals;
  int group;  // 0 or 1, of those that multiply

  INGOT_DEVICE static void done(Signal* signal) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) signal_arrive(signal);
  }
  // The two warpgroups multiply in turn: while one does, the other makes weights.
  INGOT_DEVICE void take_turn() const { barrier_wait<2 * kGroup>(1 + group); }
  INGOT_DEVICE void end_turn() const { barrier_pass<2 * kGroup>(2 - group); }

  INGOT_DEVICE void read(int pieces) const {
    unsigned char* keys = memory + 2 * Shape::kQueryBytes;
    unsigned char* values = keys + Shape::kStages * Shape::kStageBytes;
    Ring<2> query;
    Ring<Shape::kStages> ring;
    PromptPieces mine(pieces);
    if (group == 1) barrier_pass<2 * kGroup>(1);
    for (int piece = mine.next(); piece < pieces; piece = mine.next(), ++query.count) {
      const int query_stage = query.stage();
      signal_wait(&signals.queries_there[query_stage], query.parity());
      const PromptWork& work = signals.work[query_stage];  // read again where it is rarely needed: registers are few
      if (work.item.count <= 0) {
        done(&signals.queries_done[query_stage]);
        continue;
      }
      const unsigned char* queries = memory + query_stage * Shape::kQueryBytes + group * 64 * kWideLine;
      // Of rows of the tile; those that the item does not have see what its last one sees.
      const auto position = [&](int row) {
        return work.item.position + min(row / (at.heads / at.kv_heads), work.item.count - 1);
      };
      const auto warp_row = [&] { return static_cast<int>(thread_anew() / kWarp) * 16 - 64; };
      const auto lane_row = [&] { return warp_row() + static_cast<int>(thread_anew() % kWarp / 4); };
      // Tiles of the piece; of the warpgroup; of which all of the warp's rows see all, with scores of a scale alone.
      const int end_tile = (work.end + Shape::kTile - 1) / Shape::kTile;
      const bool some = group * 64 < work.item.count * (at.heads / at.kv_heads);
      const int begin = some ? at.first_visible(position(group * 64)) / Shape::kTile : end_tile;
      const int end = some ? position(group * 64 + 63) / Shape::kTile + 1 : end_tile;
      const int plain_begin = (at.first_visible(position(warp_row() + 15)) + Shape::kTile - 1) / Shape::kTile;
      const int plain_end = kBends ? 0 : (position(warp_row()) + 1) / Shape::kTile;

      PromptRows own;
      own.clear();
      own.scale = kBends ? kLog2e : at.scale * kLog2e;

      const auto skip = [&] {
        take_turn();
        end_turn();
        const int stage = ring.stage();
        signal_wait(&signals.keys_there[stage], ring.parity());
        done(&signals.keys_done[stage]);
        signal_wait(&signals.values_there[stage], ring.parity());
        done(&signals.values_done[stage]);
        ring.count += 1;
      };
      const auto scores_of = [&](const Ring<Shape::kStages>& use) {
        signal_wait(&signals.keys_there[use.stage()], use.parity());
        let_units_see();
        take_turn();
        group_begin();
        own.multiply(queries, keys + use.stage() * Shape::kStageBytes);
        group_commit();
      };
      const auto add_values = [&](const PromptRows::Weights& weights) {
        signal_wait(&signals.values_there[ring.stage()], ring.parity());
        let_units_see();
        group_begin();
        own.add(weights, values + ring.stage() * Shape::kStageBytes);
        group_commit();
      };
      const auto weigh = [&](PromptRows::Weights& weights, int tile) {
        if (tile < plain_begin || tile >= plain_end) {
          const int row = lane_row(), positions[2] = {position(row), position(row + 8)};
          if constexpr (kBends) own.bend(at, tile * Shape::kTile, work.kv_head, row, positions);
          own.hide(at, tile * Shape::kTile, positions);
        }
        float added[2];
        own.exponents(weights, added);
        if (__any_sync(kAllLanes, fmaxf(added[0], added[1]) > PromptRows::kHighest)) {
          group_wait<0>(own.sums);
          own.choose_base(added);
          own.exponents(weights, added);
        }
        own.weight[0] += added[0], own.weight[1] += added[1];
      };
      // sums += weights * values of the tile before; next: the weights of this one.
      const auto step = [&](const PromptRows::Weights& weights, PromptRows::Weights& next, int tile) {
        Ring<Shape::kStages> now = ring;
        now.count += 1;
        scores_of(now);
        add_values(weights);
        end_turn();
        group_wait<1>(own.scores);
        done(&signals.keys_done[now.stage()]);
        weigh(next, tile);
        group_wait<0>(own.sums);
        done(&signals.values_done[ring.stage()]);
        ring = now;
      };
      const auto finish = [&](const PromptRows::Weights& weights) {
        add_values(weights);
        group_wait<0>(own.sums);
        done(&signals.values_done[ring.stage()]);
        ring.count += 1;
      };

      for (int tile = work.begin / Shape::kTile; tile < begin; ++tile) skip();
      if (begin < end) {
        PromptRows::Weights weights[2];
        scores_of(ring);
        end_turn();
        group_wait<0>(own.scores);
        done(&signals.keys_done[ring.stage()]);
        weigh(weights[0], begin);
        int tile = begin + 1;
        for (; tile + 1 < end; tile += 2) {
          step(weights[0], weights[1], tile);
          step(weights[1], weights[0], tile + 1);
        }
        if (tile < end) {
          step(weights[0], weights[1], tile);
          finish(weights[1]);
        } else {
          finish(weights[0]);
        }
      }
      for (int tile = end; tile < end_tile; ++tile) skip();
      own.write(at, work, lane_row());
      done(&signals.queries_done[query_stage]);
    }
  }
};

// items: of the step; parts: of each, see PrefillBlock.
template <bool kBends>
INGOT_DEVICE void attend_pieces(unsigned char* memory, PromptSignals& signals, const Attention& at, int items,
                                int parts) {
  using Shape = PromptShape;
  const int pieces = items * parts * at.kv_heads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      signal_init(&signals.queries_there[i], kGroup);
      signal_init(&signals.queries_done[i], 4 * Shape::kConsumers);
    }
    for (int i = 0; i < Shape::kStages; ++i) {
      signal_init(&signals.keys_there[i], kGroup), signal_init(&signals.values_there[i], kGroup);
      signal_init(&signals.keys_done[i], 4 * Shape::kConsumers);
      signal_init(&signals.values_done[i], 4 * Shape::kConsumers);
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    give_registers<Shape::kCopierRegisters>();
    PromptCopier{at, memory, signals}.copy(pieces, parts);
  } else {
    take_registers<Shape::kRegisters>();
    PromptReader<kBends>{at, memory, signals, static_cast<int>(threadIdx.x / kGroup) - 1}.read(pieces);
  }
}
