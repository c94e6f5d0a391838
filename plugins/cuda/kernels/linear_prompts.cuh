// Linear attention of prompts: the tokens of a sequence in tiles, which lie in shared memory.
//
//   warps 0 to 3   tile i       the state goes on, token by token
//   warps 4 to 7   tile i + 1   arrives, by asynchronous copies; its keys are normed, its decays and factors made
//
// Each of the first four warps has 8 columns of the state. Lane 4 * p + c holds columns 2 * c and 2 * c + 1 of parts p
// and p + 8. The sums of a key with the state are the only way from one token to the next: three shuffles. Meanwhile
// the lanes compute the result of the token before, for which they keep the state as it was.
#pragma once

#include "linear_attention.cuh"
#include "matrix_units.cuh"

// kRows: of a part, at most. A token of a tile: [q | k | keeps][kDims], v [kStripColumns], factors [4]: what the state
// keeps, the share of the change, the factor of the query, 0. Dims lie in fours, of which those of all parts stand side
// by side: four i of part p is number i * 16 + p. Then a load of the lanes finds all parts in 128 bytes.
template <int kRows, bool kByDim>
struct LinearTile {
  static constexpr int kDims = kKeyParts * kRows;
  static constexpr int kTokens = 2048 / kDims, kOfWarp = kTokens / (kLinearThreads / kWarp);  // that a warp prepares
  static constexpr int kKeys = kDims, kKeeps = 2 * kDims, kValues = (kByDim ? 3 : 2) * kDims;
  static constexpr int kFactors = kValues + kStripColumns;
  static constexpr int kStride = kFactors + 4;
};

template <int kRows, bool kDelta, bool kByDim>
struct LinearPrompt {
  using Tile = LinearTile<kRows, kByDim>;
  static constexpr int kOwn = 2 * kRows;  // rows of a lane
  // Whether registers have room for a state and for a decayed one, so that a result may wait.
  static constexpr bool kLater = kDelta && kRows <= 8;
  static constexpr bool kAhead = kRows <= 8;  // likewise for the next token

  const LinearShape& shape;
  const Item& run;
  int head;
  float rate;

  // The lane's place.
  int part, columns;  // the first of two, in the strip

  // The four `number` of a key in a tile: its first dim, and how many of its dims there are.
  INGOT_DEVICE int dim_of(int number, int* count) const {
    const int each = shape.part_rows(), in_part = number / kKeyParts * 4, dim = number % kKeyParts * each + in_part;
    *count = in_part < each ? shape.key_dim - dim : 0;
    return dim;
  }
  INGOT_DEVICE static void copy_four(float* to, const float* from, int offset, int count, bool whole) {
    if (whole) {
      copy_async(to, count > 0 ? from + offset : from, count > 0);
      return;
    }
    for (int i = 0; i < 4; ++i) to[i] = i < count ? from[offset + i] : 0.f;
  }

  // A preparing warp has tokens `warp`, `warp` + 4, ... of a tile: calls of(which of its tokens, place in the tile).
  template <class Visit>
  INGOT_DEVICE static void of_warp(int warp, int tokens, Visit of) {
#pragma unroll
    for (int i = 0; i < Tile::kOfWarp; ++i) {
      const int token = warp + i * (kLinearThreads / kWarp);
      if (token < tokens) of(i, token);
    }
  }

  // What a lane of a preparing warp copies of each of its tokens, where all fours are whole: made once for all tiles.
  struct Copies {
    static constexpr int kOfLane = (Tile::kFactors / 4 + kWarp - 1) / kWarp;
    const float* from[kOfLane];  // of the first token of the warp in the next tile
    bool valid[kOfLane];
  };
  INGOT_DEVICE int64_t copy_stride(int copy) const {  // from a token to the next one
    const bool of_dt = kByDim && copy / (Tile::kDims / (4 * kWarp)) == 2;
    return of_dt ? static_cast<int64_t>(shape.heads) * shape.key_dim : shape.row();
  }
  INGOT_DEVICE Copies copies(const float* x, const float* dt, int warp) const {
    Copies found;
    const LinearRow row(shape, x, run.token + warp, head);
#pragma unroll
    for (int i = 0; i < Copies::kOfLane; ++i) {
      const int number = threadIdx.x % kWarp + i * kWarp, which = number / (Tile::kDims / 4);
      const float* from = which ? row.k : row.q;
      int count, first = dim_of(number % (Tile::kDims / 4), &count);
      if (which >= Tile::kValues / Tile::kDims) {
        first = blockIdx.z * kStripColumns + 4 * (number - Tile::kValues / 4), count = shape.value_dim - first;
        from = row.v;
      } else if (which == 2) {
        from = dt + (static_cast<int64_t>(run.token + warp) * shape.heads + head) * shape.key_dim;
      }
      found.valid[i] = count > 0, found.from[i] = count > 0 ? from + first : x;
    }
    return found;
  }
  INGOT_DEVICE void load_whole(float* tile, Copies& of, int warp, int tokens) const {
#pragma unroll
    for (int i = 0; i < Copies::kOfLane; ++i) {
      const int number = threadIdx.x % kWarp + i * kWarp;
      const int64_t stride = copy_stride(i);
      if (number < Tile::kFactors / 4) {
        of_warp(warp, tokens, [&](int which, int token) {
          const float* from = of.from[i] + (of.valid[i] ? which * stride * (kLinearThreads / kWarp) : 0);
          copy_async(tile + token * Tile::kStride + 4 * number, from, of.valid[i]);
        });
      }
      if (of.valid[i]) of.from[i] += stride * Tile::kTokens;
    }
    copy_commit();
  }

  // Copies of a tile, whose first token has an index in the run.
  INGOT_DEVICE void load(float* tile, const float* x, const float* dt, int warp, int index) const {
    constexpr int kFours = Tile::kFactors / 4, kOfKey = Tile::kDims / 4;
    const LinearRow row(shape, x, run.token + index, head);
    for (int number = threadIdx.x % kWarp; number < kFours; number += kWarp) {
      const int which = number / kOfKey;
      const float* from = which ? row.k : row.q;
      int64_t stride = shape.row();
      bool whole = shape.whole_keys();
      int count, first = dim_of(number % kOfKey, &count);
      if (which >= Tile::kValues / Tile::kDims) {
        first = blockIdx.z * kStripColumns + 4 * (number - Tile::kValues / 4), count = shape.value_dim - first;
        from = row.v, whole &= shape.whole_values();
      } else if (which == 2) {
        stride = static_cast<int64_t>(shape.heads) * shape.key_dim, whole = shape.key_dim % 4 == 0;
        from = dt + (run.token + index) * stride + head * shape.key_dim;
      }
      of_warp(warp, min(Tile::kTokens, run.count - index), [&](int, int token) {
        copy_four(tile + token * Tile::kStride + 4 * number, from + token * stride, first, count, whole);
      });
    }
    copy_commit();
  }

  // Norms keys, and makes decays and factors. own_dt, own_beta: of token lane % kOfWarp of the warp
  INGOT_DEVICE void prepare(float* tile, int warp, int tokens, float own_dt, float own_beta) const {
    constexpr int kOfWarp = Tile::kOfWarp;
    const int lane = threadIdx.x % kWarp, of_key = lane % 2;
    float factor = 1.f;  // of the query or the key of token lane / 2 % kOfWarp
    if (shape.l2_eps > 0.f) {
      float squares[kOfWarp] = {};
      float* fours = tile + of_key * Tile::kKeys + lane / 2 * 4;  // of the lane's part
      of_warp(warp, tokens, [&](int which, int token) {
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {
          const Four<float> four = load_four(fours + token * Tile::kStride + 4 * i * kKeyParts);
          for (const float number : four.at) squares[which] = fmaf(number, number, squares[which]);
        }
      });
      float mine = 0.f;
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const float sum = sum_parts(squares[i]);
        if (lane / 2 % kOfWarp == i) mine = sum;
      }
      factor = shape.norm_factor(mine);
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const float of_key_now = __shfl_sync(kAllLanes, factor, 2 * i + 1);
        const int token = warp + i * (kLinearThreads / kWarp);
        if (token >= tokens || !of_key) continue;
#pragma unroll
        for (int j = 0; j < kRows / 4; ++j) {
          Four<float>& four = *reinterpret_cast<Four<float>*>(fours + token * Tile::kStride + 4 * j * kKeyParts);
          Four<float> normed = four;
          for (float& number : normed.at) number *= of_key_now;
          four = normed;
        }
      }
    }
    if (kByDim) {
#pragma unroll 1
      for (int token = warp; token < tokens; token += kLinearThreads / kWarp) {
#pragma unroll 4
        for (int i = lane; i < Tile::kDims; i += kWarp) {
          float& keeps = tile[token * Tile::kStride + Tile::kKeeps + i];
          keeps = expf(-rate * shape.step_of(keeps));
        }
      }
    }
    const float step = shape.step_of(own_dt), decay = expf(-rate * step), share = kDelta ? sigmoid(own_beta) : step;
    const float of_query = __shfl_sync(kAllLanes, factor, 2 * lane % (2 * kOfWarp));
    const int token = warp + lane * (kLinearThreads / kWarp);
    if (lane < kOfWarp && token < tokens) {
      float* factors = tile + token * Tile::kStride + Tile::kFactors;
      *reinterpret_cast<Four<float>*>(factors) = Four<float>{{decay, share, shape.scale * of_query, 0.f}};
    }
  }

  // The state at the lane's rows and two columns: half h of the rows is of part p + 8 * h.
  float state[kOwn][2];

  // of(two numbers of the state, their place in a slot, how many of them are there)
  template <class Visit>
  INGOT_DEVICE void visit(Visit of) {
    const int each = shape.part_rows(), column = blockIdx.z * kStripColumns + columns;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int in_part = i % kRows, row = (part + i / kRows * (kKeyParts / 2)) * each + in_part;
      const bool there = in_part < each && row < shape.key_dim;
      of(state[i], shape.place(head, row, column), there ? shape.value_dim - column : 0);
    }
  }
  INGOT_DEVICE void load_state(const float* slot) {
    visit([&](float (&two)[2], int64_t, int) { two[0] = two[1] = 0.f; });
    if (!slot) return;
    if (shape.whole_values()) {
      visit([&](float (&two)[2], int64_t place, int count) {
        if (count <= 0) return;
        const TwoFloats found = *reinterpret_cast<const TwoFloats*>(slot + place);
        two[0] = found.first, two[1] = found.second;
      });
    } else {
      visit([&](float (&two)[2], int64_t place, int count) {
        if (count > 0) two[0] = slot[place];
        if (count > 1) two[1] = slot[place + 1];
      });
    }
  }
  INGOT_DEVICE void store_state(float* slot) {
    if (shape.whole_values()) {
      visit([&](float (&two)[2], int64_t place, int count) {
        if (count > 0) *reinterpret_cast<TwoFloats*>(slot + place) = TwoFloats{two[0], two[1]};
      });
    } else {
      visit([&](float (&two)[2], int64_t place, int count) {
        if (count > 0) slot[place] = two[0];
        if (count > 1) slot[place + 1] = two[1];
      });
    }
  }

  // The lane's rows of a query, a key or decays.
  struct Rows {
    Four<float> fours[kOwn / 4];
    INGOT_DEVICE float at(int row) const { return fours[row / 4].at[row % 4]; }
  };
  INGOT_DEVICE Rows rows(const float* of) const {
    Rows found;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      const int in_part = i % (kRows / 4), half = i / (kRows / 4);
      found.fours[i] = load_four(of + (in_part * kKeyParts + part + half * (kKeyParts / 2)) * 4);
    }
    return found;
  }
  // The lane's part of the sums of a query or a key with the state, or with a decayed one.
  INGOT_DEVICE static void multiply(float (&sums)[2], const Rows& by, const float (&with)[kOwn][2]) {
    float halves[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          halves[half][c] = fmaf(by.at(half * kRows + i), with[half * kRows + i][c], halves[half][c]);
        }
      }
    }
    sums[0] = halves[0][0] + halves[1][0], sums[1] = halves[0][1] + halves[1][1];
  }

  // A stage of a sum over the parts: of both columns in all lanes, or of one of them in each half of the warp.
  INGOT_DEVICE static void add_stage(float (&sums)[2], int step) {
    sums[0] += __shfl_xor_sync(kAllLanes, sums[0], step), sums[1] += __shfl_xor_sync(kAllLanes, sums[1], step);
  }
  INGOT_DEVICE static bool upper() { return threadIdx.x % kWarp >= kWarp / 2; }
  INGOT_DEVICE static float add_halves(const float (&sums)[2]) {
    const float own = upper() ? sums[1] : sums[0], other = upper() ? sums[0] : sums[1];
    return own + __shfl_xor_sync(kAllLanes, other, kWarp / 2);
  }
  INGOT_DEVICE static float add_stage(float sum, int step) { return sum + __shfl_xor_sync(kAllLanes, sum, step); }

  // Stores what the lanes of the warp have found of a tile's tokens.
  INGOT_DEVICE void store_results(float* to, const float* results, int tokens) const {
    __syncwarp();
    for (int i = threadIdx.x % kWarp; i < tokens * kWarpColumns / 2; i += kWarp) {
      const int token = i / (kWarpColumns / 2), pair = i % (kWarpColumns / 2), warp = threadIdx.x / kWarp;
      const int column = blockIdx.z * kStripColumns + warp * kWarpColumns + 2 * pair;
      const float* from = results + token * kLinearThreads + warp * kWarp + pair;
      float* at = to + static_cast<int64_t>(token) * shape.heads * shape.value_dim + column;
      const TwoFloats found{from[0], from[kWarp / 2]};
      if (shape.whole_values()) {
        if (column < shape.value_dim) *reinterpret_cast<TwoFloats*>(at) = found;
      } else {
        if (column < shape.value_dim) at[0] = found.first;
        if (column + 1 < shape.value_dim) at[1] = found.second;
      }
    }
    __syncwarp();
  }

  INGOT_DEVICE float (&where_decayed(float (&apart)[kLater ? kOwn : 1][2])) [kOwn][2] {
    if constexpr (kLater) {
      return apart;
    } else {
      return state;
    }
  }

  struct Token {
    Rows k, keeps;
    Four<float> factors;
    TwoFloats v;
  };
  INGOT_DEVICE Token token_at(const float* at) const {
    Token found;
    found.k = rows(at + Tile::kKeys);
    if (kByDim) found.keeps = rows(at + Tile::kKeeps);
    found.factors = load_four(at + Tile::kFactors);
    found.v = *reinterpret_cast<const TwoFloats*>(at + Tile::kValues + columns);
    return found;
  }

  // The state goes on by the tokens of a tile, whose first has an index in the run. results: [tokens][threads]
  INGOT_DEVICE void go_on(float* results, const float* tile, int tokens, int index, float own_skip,
                          const States& states) {
    constexpr int kBehind = kLater ? 2 : 1;
    const int of_results = columns + upper();
    float waiting[2] = {0.f, 0.f};  // sums of the query of the token kBehind before: at first of none
    const float* at = tile;
    float* result = results + threadIdx.x;
    Token next = token_at(at);
    Rows query = next.k;  // kLater: of the token before; at first any
    for (int token = 0; token < tokens;) {
      const int stop = min(tokens, token + states.until_end(run.position + index + token));
#pragma unroll(kAhead ? 2 : 1)  // by two, nothing moves from the next token's registers into this one's
      for (; token < stop; ++token, at += Tile::kStride) {
        // All loads come before the store, which nvcc would not move them across.
        const Token of = next;
        const bool some = token >= kBehind;
        const float* behind = some ? at - kBehind * Tile::kStride : at;
        const float value = behind[Tile::kValues + of_results], q_factor = behind[Tile::kFactors + 2];
        const Rows q = kLater ? query : rows(at);
        if (kLater) query = rows(at);
        if (kAhead) next = token_at(token + 1 < tokens ? at + Tile::kStride : at);
        float apart[kLater ? kOwn : 1][2];
        auto& decayed = where_decayed(apart);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) decayed[i][c] = state[i][c] * (kByDim ? of.keeps.at(i) : of.factors.at[0]);
        }
        float sums[2] = {0.f, 0.f};
        if (kDelta) multiply(sums, of.k, decayed), add_stage(sums, kWarp / 2);
        float sum = add_halves(waiting);
        if (kLater) multiply(waiting, q, state);
        if (kDelta) add_stage(sums, kWarp / 4);
        sum = add_stage(sum, kWarp / 4);
        if (kDelta) add_stage(sums, kWarp / 8);
        sum = add_stage(sum, kWarp / 8);
        *result = fmaf(own_skip, value, sum * q_factor);
        result += some ? kLinearThreads : 0;
        const float change[2] = {of.factors.at[1] * (kDelta ? of.v.first - sums[0] : of.v.first),
                                 of.factors.at[1] * (kDelta ? of.v.second - sums[1] : of.v.second)};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int c = 0; c < 2; ++c) state[i][c] = fmaf(of.k.at(i), change[c], decayed[i][c]);
        }
        if (!kLater) multiply(waiting, q, state);
        if (!kAhead) next = token_at(token + 1 < tokens ? at + Tile::kStride : at);
      }
      if (float* slot = states.after(run, index + token - 1)) store_state(slot);
    }
    const auto finish = [&](const float* behind) {
      const float sum = add_stage(add_stage(add_halves(waiting), kWarp / 4), kWarp / 8);
      *result = fmaf(own_skip, behind[Tile::kValues + of_results], sum * behind[Tile::kFactors + 2]);
    };
    if (kLater) {
      if (tokens > 1) finish(at - 2 * Tile::kStride), result += kLinearThreads;
      multiply(waiting, rows(at - Tile::kStride), state);
    }
    finish(at - Tile::kStride);
  }

  INGOT_DEVICE void attend(float* y, const float* x, const float* dt, const float* beta, float own_skip, int warp,
                           const States& states, float* shared) {
    const auto tile_at = [&](int index) {
      return shared + index / Tile::kTokens % 2 * (Tile::kTokens * Tile::kStride);
    };
    const bool prepares = warp >= kLinearThreads / kWarp;
    const int own = warp % (kLinearThreads / kWarp);
    float own_dt = 0.f, own_beta = 0.f;
    // Keys of 256 dims with a decay for each leave no registers for places.
    const bool whole = (kRows <= 8 || !kByDim) && shape.whole_keys() && shape.whole_values();
    Copies next = copies(x, dt, own);
    const auto load_tile = [&](int index) {
      if (whole) {
        load_whole(tile_at(index), next, own, min(Tile::kTokens, run.count - index));
      } else {
        load(tile_at(index), x, dt, own, index);
      }
      const int token = own + threadIdx.x % Tile::kOfWarp * (kLinearThreads / kWarp);
      if (index + token >= run.count) return;
      const int64_t at = static_cast<int64_t>(run.token + index + token) * shape.heads + head;
      if (!kByDim) own_dt = dt[at];
      if (kDelta) own_beta = beta[at];
    };
    if (prepares) {
      load_tile(0);
    } else {
      load_state(states.before(run));
    }
    for (int index = 0; index < run.count + Tile::kTokens; index += Tile::kTokens) {
      if (prepares && index < run.count) {
        copy_wait<0>();
        __syncwarp();
        prepare(tile_at(index), own, min(Tile::kTokens, run.count - index), own_dt, own_beta);
      }
      if (!prepares && index > 0) {
        const int before = index - Tile::kTokens, tokens = min(Tile::kTokens, run.count - before);
        float* results = shared + 2 * Tile::kTokens * Tile::kStride;
        go_on(results, tile_at(before), tokens, before, own_skip, states);
        store_results(y + (static_cast<int64_t>(run.token + before) * shape.heads + head) * shape.value_dim, results,
                      tokens);
      }
      __syncthreads();  // one tile is prepared, and nobody reads the other one
      if (prepares && index + Tile::kTokens < run.count) load_tile(index + Tile::kTokens);
    }
  }
};

// The same in all lanes of a warp, so that nvcc knows it: then no shuffle of a loop waits for lanes that might be
// behind.
INGOT_DEVICE Item uniform(const Item& run) {
  return Item{__shfl_sync(kAllLanes, run.sequence, 0), __shfl_sync(kAllLanes, run.token, 0),
              __shfl_sync(kAllLanes, run.count, 0), __shfl_sync(kAllLanes, run.position, 0)};
}

template <int kRows, bool kDelta, bool kByDim>
INGOT_DEVICE void attend_prompts(float* y, const float* x, const float* dt, const float* beta, const float* a_log,
                                 const float* skip, const Item& run, const States& states, const LinearShape& shape,
                                 unsigned char* shared) {
  const int head = blockIdx.y, warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / kWarp), 0);
  const int lane = threadIdx.x % kWarp, columns = warp * kWarpColumns + lane % 4 * 2;
  LinearPrompt<kRows, kDelta, kByDim> prompt{shape, run, head, expf(a_log[head]), lane / 4, columns, {}};
  prompt.attend(y, x, dt, beta, skip ? skip[head] : 0.f, warp, states, reinterpret_cast<float*>(shared));
}

// As the op linear_attention says, with the bits of linear_attention_128 and _256: the gated delta rule (delta), Kimi
// Delta Attention (kda), Mamba 2. Grid: (sequences, heads, strips of kStripColumns columns of a value)
#define INGOT_PROMPTS_KERNEL(name, rows, delta, of_dims)                                                             \
  INGOT_KERNEL(2 * kLinearThreads)                                                                                   \
  name(INGOT_LINEAR_PARAMETERS) {                                                                                    \
    wait_for_previous();                                                                                             \
    INGOT_SHARED(shared);                                                                                            \
    attend_prompts<rows, delta, of_dims>(y, x, dt, beta, a_log, skip, uniform(runs[blockIdx.x]), INGOT_STATES_GIVEN, \
                                         INGOT_LINEAR_SHAPE, shared);                                                \
  }
INGOT_PROMPTS_KERNEL(delta_prompts_128, 8, true, false)
INGOT_PROMPTS_KERNEL(delta_prompts_256, 16, true, false)
INGOT_PROMPTS_KERNEL(kda_prompts_128, 8, true, true)
INGOT_PROMPTS_KERNEL(kda_prompts_256, 16, true, true)
INGOT_PROMPTS_KERNEL(mamba_prompts_128, 8, false, false)
INGOT_PROMPTS_KERNEL(mamba_prompts_256, 16, false, false)
