// How a block goes through a row of logits: 16 bytes a load, four loads of each thread under way. Each warp has a range
// of the ids, so that sums of the warps are sums of neighbours.
#pragma once

#include "device.cuh"

constexpr int kDrawThreads = 512;
constexpr int kDrawWarps = kDrawThreads / kWarp;
constexpr int kBatch = 16;         // logits that a thread has at a time
constexpr int kWeighing = 8;       // the same where more is to be kept of each
constexpr int kCandidates = 1024;  // ids that a block can keep at hand
constexpr int kBins = 1024;

INGOT_DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

// Floats in their order as unsigned numbers.
INGOT_DEVICE uint32_t float_to_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 counts as 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INGOT_DEVICE float key_to_float(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Ids with their logits, in any order.
struct Candidates {
  float values[kCandidates];
  int ids[kCandidates];
  uint64_t weights[kDrawThreads];  // of the first
};
// Sums of 64 bits, for which 32-bit additions are native.
struct Histogram {
  uint32_t low[kBins], high[kBins];

  INGOT_DEVICE void add(int bin, uint64_t value) {
    const uint32_t added = static_cast<uint32_t>(value), before = atomicAdd(&low[bin], added);
    const uint32_t carried = static_cast<uint32_t>(value >> 32) + (before + added < before ? 1 : 0);
    if (carried) atomicAdd(&high[bin], carried);
  }
  INGOT_DEVICE uint64_t sum(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
};

struct DrawMemory {
  union {  // one after the other
    Candidates candidates;
    Histogram histogram;
    float highest[kDrawThreads];
  };
  float tops[kDrawWarps], totals[kDrawWarps];
  int places[kDrawWarps];
  uint64_t sums[kDrawWarps];
  uint64_t above;  // see find_bin
  uint32_t count;  // candidates found, also those without room
  int bin, picked;
  float bound;
  float plain_top, plain_log;  // of the logits before any rule: the highest, and the logarithm of their Summary::total
};

// Some logits of a thread. Where there is none, minus infinity with an id that no vocabulary has.
template <int kSize>
struct Batch {
  float values[kSize];
  int first[kSize / 4];

  INGOT_DEVICE int id(int i) const { return first[i / 4] + i % 4; }
};

struct Range {
  int begin, end;
};

// Of a warp: whole fours, counted from the first id that lies on 16 bytes.
INGOT_DEVICE int aligned_begin(const float* logits) {
  return static_cast<int>((4 - (reinterpret_cast<uintptr_t>(logits) >> 2) % 4) % 4);
}
INGOT_DEVICE Range range_of(const float* logits, int vocab, int warp) {
  const int first = aligned_begin(logits), fours = (vocab + 3) / 4, size = 4 * ((fours + kDrawWarps - 1) / kDrawWarps);
  return {warp == 0 ? 0 : min(vocab, first + warp * size), min(vocab, first + (warp + 1) * size)};
}

// f(Batch) for all logits of this thread; every lane of the warp makes the same calls.
template <int kSize, class F>
INGOT_DEVICE void visit(const float* logits, int vocab, F f) {
  constexpr int kNone = 0x7ffffff0;
  const int lane = threadIdx.x % kWarp;
  const Range range = range_of(logits, vocab, static_cast<int>(threadIdx.x) / kWarp);
  const int begin = min(range.end, max(range.begin, aligned_begin(logits))), fours = (range.end - begin) / 4;
  const int tail = begin + 4 * fours, edges = begin - range.begin + range.end - tail;  // of a row, at most 6 logits
  constexpr int kStride = kWarp * kSize / 4;
  const int last = (fours + kStride - 1) / kStride;
  for (int turn = 0; turn < last + (edges ? 1 : 0); ++turn) {
    Batch<kSize> batch;
    if (turn < last) {
#pragma unroll
      for (int u = 0; u < kSize / 4; ++u) {
        const int four = turn * kStride + u * kWarp + lane;
        Four<float> found{{minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()}};
        if (four < fours) found = load_four(logits + begin + 4 * four);
        batch.first[u] = four < fours ? begin + 4 * four : kNone;
#pragma unroll
        for (int e = 0; e < 4; ++e) batch.values[4 * u + e] = found.at[e];
      }
    } else {
      const int head = begin - range.begin;
      const int id = lane < head ? range.begin + lane : tail + lane - head;
#pragma unroll
      for (int i = 0; i < kSize; ++i) batch.values[i] = minus_infinity();
#pragma unroll
      for (int u = 0; u < kSize / 4; ++u) batch.first[u] = kNone;
      if (id < range.end) batch.values[0] = logits[id], batch.first[0] = id;
    }
    f(batch);
  }
}

INGOT_DEVICE uint64_t shuffle_wide(uint64_t value, int step) {
  const uint32_t low = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(value), step);
  return static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, static_cast<uint32_t>(value >> 32), step)) << 32 | low;
}

// Sum of the threads' values before this one's, and of all.
INGOT_DEVICE uint64_t sum_before(uint64_t value, uint64_t& total, DrawMemory& memory) {
  const int warp = threadIdx.x / kWarp;
  uint64_t before = 0;
  for (int step = 1; step < kWarp; step *= 2) {  // value: of groups of lanes
    const uint64_t other = shuffle_wide(value, step);
    if (threadIdx.x & static_cast<unsigned>(step)) before += other;
    value += other;
  }
  if (threadIdx.x % kWarp == 0) memory.sums[warp] = value;
  __syncthreads();
  total = 0;
#pragma unroll 4
  for (int i = 0; i < kDrawWarps; ++i) {
    if (i == warp) before += total;
    total += memory.sums[i];
  }
  __syncthreads();  // the memory may be used again
  return before;
}
INGOT_DEVICE uint64_t sum_of_all(uint64_t value, DrawMemory& memory) {
  uint64_t total;
  sum_before(value, total, memory);
  return total;
}

INGOT_DEVICE float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
INGOT_DEVICE int warp_min(int value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// The highest of a row of logits, the lowest id that has it, and the sum of exp(logit - highest). wrong: the row is no
// distribution. own: the highest of this thread's logits.
struct Summary {
  float top;
  int place;
  float total;
  bool wrong;
  float own;
};

INGOT_DEVICE Summary summarise(const float* logits, int vocab, DrawMemory& memory) {
  constexpr float kLeast = -3.4e38f;  // stands for minus infinity, from which nothing can be subtracted
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float own = minus_infinity(), base = kLeast, total = 0.f;
  int where = vocab;  // begins the first batch that has `own`
  visit<kBatch>(logits, vocab, [&](const Batch<kBatch>& batch) {
    float most = batch.values[0];
#pragma unroll
    for (int i = 1; i < kBatch; ++i) most = fmaxf(most, batch.values[i]);
    where = most > own ? batch.first[0] : where;
    own = fmaxf(own, most);
    const float higher = fmaxf(base, most);
    total *= fast_exp2((base - higher) * kLog2e), base = higher;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) total += fast_exp2((batch.values[i] - base) * kLog2e);
  });
  const bool is_warp = lane < kDrawWarps;
  float top = warp_max(own);
  if (lane == 0) memory.tops[warp] = top;
  __syncthreads();
  top = warp_max(is_warp ? memory.tops[lane] : minus_infinity());
  total = warp_sum(total * fast_exp2((base - fmaxf(top, kLeast)) * kLog2e));
  int place = vocab;
  if (own == top) {
    for (int i = 0; i < kBatch; ++i) {
      const int id = where + i / 4 * 4 * kWarp + i % 4;
      if (id < vocab && logits[id] == top) place = min(place, id);
    }
  }
  const int me = threadIdx.x;  // the first ids may come last in a range
  if (me < min(4, vocab) && logits[me] == top) place = min(place, me);
  place = warp_min(place);
  if (lane == 0) memory.totals[warp] = total, memory.places[warp] = place;
  __syncthreads();
  total = warp_sum(is_warp ? memory.totals[lane] : 0.f), place = warp_min(is_warp ? memory.places[lane] : vocab);
  __syncthreads();
  if (place >= vocab) place = 0;
  return {top, place, total, total != total || top - top != 0.f, own};
}

// Keeps the tokens that are wanted(id, logit) as candidates; memory.count is how many there are. weighs: gives the sum
// of weight(logit) over all tokens.
template <class Wanted, class Weight>
INGOT_DEVICE uint64_t gather(const float* logits, int vocab, Wanted wanted, bool weighs, Weight weight,
                             DrawMemory& memory) {
  if (threadIdx.x == 0) memory.count = 0;
  __syncthreads();
  uint64_t sum = 0;
  visit<kWeighing>(logits, vocab, [&](const Batch<kWeighing>& batch) {
    if (weighs) {
#pragma unroll
      for (int i = 0; i < kWeighing; ++i) sum += weight(batch.values[i]);
    }
    bool any = false;
#pragma unroll
    for (int i = 0; i < kWeighing; ++i) any |= wanted(batch.id(i), batch.values[i]);
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kWeighing; ++i) {
      if (!wanted(batch.id(i), batch.values[i])) continue;
      const uint32_t place = atomicAdd(&memory.count, 1u);
      if (place >= kCandidates) continue;
      memory.candidates.values[place] = batch.values[i], memory.candidates.ids[place] = batch.id(i);
    }
  });
  if (weighs) return sum_of_all(sum, memory);
  __syncthreads();
  return 0;
}

// The first id, in the order of the ids, at which the sum of weight(id, logit) passes goal(sum of all).
template <class Weight, class Goal>
INGOT_DEVICE int walk(const float* logits, int vocab, Weight weight, Goal goal_of, DrawMemory& memory) {
  uint64_t sum = 0, total = 0, running = 0;
  visit<kWeighing>(logits, vocab, [&](const Batch<kWeighing>& batch) {
#pragma unroll
    for (int i = 0; i < kWeighing; ++i) sum += weight(batch.id(i), batch.values[i]);
  });
  for (int step = kWarp / 2; step > 0; step /= 2) sum += shuffle_wide(sum, step);
  if (threadIdx.x % kWarp == 0) memory.sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  for (int i = 0; i < kDrawWarps; ++i) total += memory.sums[i];
  const uint64_t goal = goal_of(total);
  int warp = 0;
  while (warp < kDrawWarps - 1 && running + memory.sums[warp] <= goal) running += memory.sums[warp++];
  if (threadIdx.x == 0) memory.picked = 0;  // of an earlier walk every thread knows
  __syncthreads();
  const Range range = range_of(logits, vocab, warp);
  const int size = (range.end - range.begin + kDrawThreads - 1) / kDrawThreads;
  const int begin = min(range.end, range.begin + static_cast<int>(threadIdx.x) * size);
  const int end = min(range.end, begin + size);
  sum = 0;
  for (int i = begin; i < end; ++i) sum += weight(i, logits[i]);
  running += sum_before(sum, total, memory);
  if (running <= goal && running + sum > goal) {
    for (int i = begin; i < end; ++i) {
      running += weight(i, logits[i]);
      if (running > goal) {
        memory.picked = i;
        break;
      }
    }
  }
  __syncthreads();
  return memory.picked;
}

// The first bin of the histogram up to which the sums reach `wanted`, and in memory.above the sum of those before it;
// kBins where all of them do not.
INGOT_DEVICE int find_bin(uint64_t wanted, DrawMemory& memory) {
  static_assert(kBins == 2 * kDrawThreads);
  const int bin = 2 * static_cast<int>(threadIdx.x);
  const uint64_t first = memory.histogram.sum(bin), second = memory.histogram.sum(bin + 1);
  if (threadIdx.x == 0) memory.bin = kBins, memory.above = 0;
  uint64_t total;
  const uint64_t before = sum_before(first + second, total, memory);
  if (before < wanted && before + first + second >= wanted) {
    const bool is_first = before + first >= wanted;
    memory.bin = is_first ? bin : bin + 1;
    memory.above = is_first ? before : before + first;
  }
  __syncthreads();
  return memory.bin;
}

// A bound that at least n of the threads' values, the highest of which is `top`, reach, and few more where they differ.
INGOT_DEVICE float bound_of_highest(float own, float top, int n, DrawMemory& memory) {
  constexpr int kMine = kDrawThreads / kWarp;
  memory.highest[threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    uint32_t keys[kMine], reached = float_to_key(top);
    const uint32_t above_all = reached + 1;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      keys[i] = float_to_key(memory.highest[threadIdx.x + i * kWarp]);
      reached = keys[i] < reached ? keys[i] : reached;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, reached, step);
      reached = other < reached ? other : reached;
    }
    uint32_t missed = above_all;  // fewer than n reach this
    while (missed - reached > 1) {
      const uint32_t middle = reached + (missed - reached) / 2;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kMine; ++i) count += keys[i] >= middle ? 1 : 0;
      for (int step = kWarp / 2; step > 0; step /= 2) count += __shfl_xor_sync(kAllLanes, count, step);
      (count >= n ? reached : missed) = middle;
      if (count >= n && count <= n + n / 4) break;
    }
    if (threadIdx.x == 0) memory.bound = key_to_float(reached);
  }
  __syncthreads();
  return memory.bound;
}
