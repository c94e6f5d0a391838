// Mixtures of experts, beside their products: which experts a row takes, which rows an expert gets, the weighted sums.
//
//   ids [rows][slots] ─ group_by_expert ▶ pairs: row * slots + slot, expert by expert     tiles: who computes which of
//   them rows x, expert by expert ─ experts_* ▶ [rows][slots][columns], in the order of rows ─ sum_experts ▶
//   [rows][columns]
#include "device.cuh"
#include "experts.cuh"

#ifdef INGOT_EXPERTS

constexpr int kGroupThreads = 256;
constexpr int kMostExperts = 32 * kWarp;  // a lane remembers those that are taken in 32 bits

INGOT_DEVICE float infinite(float key) { return key != key ? __uint_as_float(0x7f800000u) : key; }

// The number of the largest of the values that are not taken, of equal ones the lowest; every lane gets it, and notes
// it if the value is its own.
INGOT_DEVICE int take_largest(const float* values, int count, uint32_t& taken) {
  const int lane = threadIdx.x % kWarp;
  float best = 0.f;
  int number = count;  // none
  for (int i = lane; i < count; i += kWarp) {
    if (taken >> (i / kWarp) & 1u) continue;
    if (number == count || values[i] > best) best = values[i], number = i;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, best, step);
    const int its = __shfl_xor_sync(kAllLanes, number, step);
    const bool larger = number == count || other > best || (other == best && its < number);
    if (its < count && larger) best = other, number = its;
  }
  if (number % kWarp == lane) taken |= 1u << (number / kWarp);
  return number;
}

// The sum of the `best` largest keys of a group.
INGOT_DEVICE float group_key(const float* keys, int count, int best) {
  float top[3] = {__uint_as_float(0xff800000u), __uint_as_float(0xff800000u), __uint_as_float(0xff800000u)};
  for (int i = 0; i < count; ++i) {
    float key = keys[i];
#pragma unroll
    for (int place = 0; place < 3; ++place) {
      const float lower = fminf(top[place], key);
      top[place] = fmaxf(top[place], key), key = lower;
    }
  }
  const float two = best > 1 ? (best > 2 ? __fadd_rn(top[2], top[1]) : top[1]) : 0.f;
  return infinite(best > 1 ? __fadd_rn(two, top[0]) : top[0]);
}

// As the op `moe_route` says. One block, a warp, per row. Shared: shares and keys of all experts, keys of all groups,
// the slots' experts twice.
INGOT_KERNEL(kWarp)
moe_route(float* ids, float* weights, const float* logits, const float* bias, int experts, int slots, int sigmoid,
          int normalized, float eps, float floor, float scale, int groups, int group_top, int group_best) {
  wait_for_previous();
  INGOT_SHARED(shared);
  float* shares = reinterpret_cast<float*>(shared);
  float* keys = shares + experts;
  float* group_keys = keys + experts;
  int* found = reinterpret_cast<int*>(group_keys + groups);
  int* sorted = found + slots;
  const int lane = threadIdx.x;
  const float* row = logits + static_cast<int64_t>(blockIdx.x) * experts;

  float top = __uint_as_float(0xff800000u), sum = 0.f;
  if (!sigmoid) {
    for (int i = lane; i < experts; i += kWarp) top = fmaxf(top, infinite(row[i]));
    for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    for (int i = lane; i < experts; i += kWarp) shares[i] = expf(row[i] - top), sum += shares[i];
    sum = warp_sum(sum);
  }
  for (int i = lane; i < experts; i += kWarp) {
    const float share = sigmoid ? 1.f / (1.f + expf(-row[i])) : shares[i] / sum;
    shares[i] = share;
    keys[i] = infinite(bias ? __fadd_rn(share, bias[i]) : sigmoid || groups > 1 ? share : row[i]);
  }
  __syncwarp();
  if (groups > 1) {
    const int size = experts / groups;
    for (int i = lane; i < groups; i += kWarp) group_keys[i] = group_key(keys + i * size, size, group_best);
    __syncwarp();
    uint32_t taken = 0;
    for (int i = 0; i < group_top; ++i) take_largest(group_keys, groups, taken);
    __syncwarp();
    for (int i = lane; i < groups; i += kWarp) group_keys[i] = taken >> (i / kWarp) & 1u ? 1.f : 0.f;
    __syncwarp();
    for (int i = lane; i < experts; i += kWarp) {
      if (group_keys[i / size] == 0.f) keys[i] = __uint_as_float(0xff800000u);
    }
    __syncwarp();
  }
  uint32_t taken = 0;
  for (int slot = 0; slot < slots; ++slot) {
    const int number = take_largest(keys, experts, taken);
    if (lane == 0) found[slot] = number;
  }
  __syncwarp();
  for (int slot = lane; slot < slots; slot += kWarp) {  // in the order of their numbers
    int place = 0;
    for (int other = 0; other < slots; ++other) place += found[other] < found[slot];
    sorted[place] = found[slot];
  }
  __syncwarp();
  float total = 0.f;
  for (int slot = 0; slot < slots; ++slot) total += shares[sorted[slot]];
  const float divisor = (total < floor ? floor : total) + eps;
  for (int slot = lane; slot < slots; slot += kWarp) {
    const int64_t to = static_cast<int64_t>(blockIdx.x) * slots + slot;
    const float share = shares[sorted[slot]];
    ids[to] = static_cast<float>(sorted[slot]);
    weights[to] = __fmul_rn(normalized ? share / divisor : share, scale);
  }
}

// An expert that there is, whatever a buffer may hold that nobody wrote.
INGOT_DEVICE int number_of(float id, int experts) {
  return id >= 0.f && id < static_cast<float>(experts) ? static_cast<int>(id) : 0;
}

// Sorts the places of ids by what they say: pairs, expert by expert, ascending. Cuts those of each expert into tiles of
// up to `tile`: tiles[i] = {expert, its first of pairs, how many}; how many is 0 in those that are left over.
// rows: points to the rows of this step. Every block counts all ids by itself, a warp one stretch of them. Grid:
// (experts)
INGOT_KERNEL(kGroupThreads)
group_by_expert(int* pairs, ExpertTile* tiles, const float* ids, const int* rows, int slots, int tile) {
  wait_for_previous();
  constexpr int kWarps = kGroupThreads / kWarp, kAhead = 4;
  __shared__ uint32_t counts[kMostExperts];
  __shared__ int own[kWarps];
  const int expert = blockIdx.x, experts = gridDim.x, total = *rows * slots;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int share = (total + kGroupThreads - 1) / kGroupThreads * kWarp;
  const int begin = min(total, warp * share), end = min(total, begin + share);
  for (int i = threadIdx.x; i < experts; i += kGroupThreads) counts[i] = 0;
  __syncthreads();
  int mine = 0;
  for (int at = begin; at < end; at += kAhead * kWarp) {
    float taken[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = at + k * kWarp + lane;
      taken[k] = i < end ? ids[i] : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool there = at + k * kWarp + lane < end;
      const int id = number_of(taken[k], experts);
      if (there) atomicAdd(&counts[id], 1u);
      mine += __popc(__ballot_sync(kAllLanes, there && id == expert));
    }
  }
  if (lane == 0) own[warp] = mine;
  __syncthreads();
  int before = 0, tiles_before = 0;  // of experts with lower numbers
  for (int i = lane; i < expert; i += kWarp) {
    const int count = counts[i];
    before += count, tiles_before += (count + tile - 1) / tile;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    before += __shfl_xor_sync(kAllLanes, before, step);
    tiles_before += __shfl_xor_sync(kAllLanes, tiles_before, step);
  }
  const int count = counts[expert], used = (count + tile - 1) / tile;
  int to = before;
  for (int i = 0; i < warp; ++i) to += own[i];
  for (int at = begin; at < end && mine; at += kWarp) {
    const int i = at + lane;
    const bool takes = i < end && number_of(ids[i], experts) == expert;
    const uint32_t all = __ballot_sync(kAllLanes, takes);
    if (takes) pairs[to + __popc(all & ((1u << lane) - 1u))] = i;
    to += __popc(all);
  }
  for (int i = threadIdx.x; i < used; i += kGroupThreads) {
    tiles[tiles_before + i] = {expert, before + i * tile, min(tile, count - i * tile), 0};
  }
  if (expert + 1 < experts) return;
  const int all = min(total, total / tile + experts);
  for (int i = tiles_before + used + threadIdx.x; i < all; i += kGroupThreads) tiles[i] = {0, 0, 0, 0};
}

// y[row] = sum of weights[row][slot] * x[row][slot], from zero, in the order of the slots. Grid: (rows, strips of 4 *
// 256 columns)
INGOT_KERNEL(kGroupThreads)
sum_experts(float* y, const float* x, const float* weights, int cols, int slots) {
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int strip = blockIdx.y * 4 * kGroupThreads;
  const float* own = weights + row * slots;
  const float* from = x + row * slots * cols;
  if (cols % 4 == 0) {
    const int col = strip + 4 * threadIdx.x;
    if (col >= cols) return;
    Four<float> sum{{0.f, 0.f, 0.f, 0.f}};
#pragma unroll 4
    for (int slot = 0; slot < slots; ++slot) {
      const Four<float> values = load_four(from + static_cast<int64_t>(slot) * cols + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.at[i] = __fadd_rn(sum.at[i], __fmul_rn(own[slot], values.at[i]));
    }
    store_four(y + row * cols + col, sum);
    return;
  }
  for (int col = strip + threadIdx.x; col < min(cols, strip + 4 * kGroupThreads); col += kGroupThreads) {
    float sum = 0.f;
    for (int slot = 0; slot < slots; ++slot) {
      sum = __fadd_rn(sum, __fmul_rn(own[slot], from[static_cast<int64_t>(slot) * cols + col]));
    }
    y[row * cols + col] = sum;
  }
}

#endif
