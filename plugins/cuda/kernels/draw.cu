// One token for each draw, by the specification of the op `sample` (without rules): greedy, or temperature, then top-k,
// then top-p, then a walk over the remaining tokens in the order of their ids.
//
// Weights are integers, exp((logit - highest) / temperature) in units of 2^-44, so that sums are exact and no order of
// additions matters. Heads of the ranking are found digit by digit, 8 bits of the logits' order at a time.
#include "device.cuh"

constexpr int kDrawThreads = 512;
constexpr int kDigits = 256;
constexpr float kUnit = 17592186044416.f;  // 2^44

struct Draw {
  const float* line;  // logits [vocab]
  int vocab;
  float top;  // the highest logit
  float temperature;

  // Logits in their order as unsigned numbers.
  INGOT_DEVICE uint32_t key(int i) const {
    const uint32_t bits = __float_as_uint(line[i] + 0.f);  // -0 counts as 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  INGOT_DEVICE uint64_t weight(int i) const {
    return static_cast<uint64_t>(expf((line[i] - top) / temperature) * kUnit);
  }
};

INGOT_DEVICE float key_to_float(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// A head of the ranking: every token above `key`, and the first `ties` ids of those at `key`.
struct Head {
  uint32_t key;
  int ties;
};

struct DrawMemory {
  float floats[kDrawThreads / kWarp];
  int places[kDrawThreads / kWarp];
  uint64_t digits[kDigits];
  uint64_t parts[kDrawThreads];
  uint64_t above;
  uint32_t key;
};

// The highest key such that the tokens at or above it reach `wanted` in sum: of ones, or of weights. `above`: the sum
// of those strictly above it.
INGOT_DEVICE uint32_t find_key(const Draw& draw, bool weighted, uint64_t wanted, DrawMemory& memory) {
  if (threadIdx.x == 0) memory.above = 0, memory.key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kDrawThreads) memory.digits[i] = 0;
    __syncthreads();
    const uint32_t prefix = memory.key;
    for (int i = threadIdx.x; i < draw.vocab; i += kDrawThreads) {
      const uint32_t key = draw.key(i);
      if (shift < 24 && (key ^ prefix) >> (shift + 8)) continue;
      add_shared(&memory.digits[key >> shift & 0xff], weighted ? draw.weight(i) : 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      uint64_t above = memory.above;
      while (digit > 0 && above + memory.digits[digit] < wanted) above += memory.digits[digit--];
      memory.above = above;
      memory.key = prefix | static_cast<uint32_t>(digit) << shift;
    }
    __syncthreads();
  }
  return memory.key;
}

// Sum of the threads' values before this one's, and of all.
INGOT_DEVICE uint64_t sum_before(uint64_t value, uint64_t& total, DrawMemory& memory) {
  memory.parts[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t sum = 0;
    for (int i = 0; i < kDrawThreads; ++i) {
      const uint64_t part = memory.parts[i];
      memory.parts[i] = sum;
      sum += part;
    }
    memory.above = sum;
  }
  __syncthreads();
  total = memory.above;
  const uint64_t before = memory.parts[threadIdx.x];
  __syncthreads();  // the memory may be used again
  return before;
}

// 24 random bits: Philox4x32-10 of the key `seed` and the counter.
INGOT_DEVICE uint32_t random_bits(uint64_t seed, uint64_t counter) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t s0 = static_cast<uint32_t>(counter), s1 = static_cast<uint32_t>(counter >> 32), s2 = 0, s3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t wide0 = uint64_t{0xD2511F53} * s0, wide1 = uint64_t{0xCD9E8D57} * s2;
    const uint32_t next0 = static_cast<uint32_t>(wide1 >> 32) ^ s1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(wide0 >> 32) ^ s3 ^ key1;
    s0 = next0, s1 = static_cast<uint32_t>(wide1), s2 = next2, s3 = static_cast<uint32_t>(wide0);
    key0 += 0x9E3779B9, key1 += 0xBB67AE85;
  }
  return s0 >> 8;
}

INGOT_DEVICE Head cut_head(const Draw& draw, int top_k, float top_p, DrawMemory& memory) {
  Head head{0, 0};  // every key is above 0
  uint64_t total, before = 0;
  if (top_k > 0 && top_k < draw.vocab) {
    head.key = find_key(draw, false, static_cast<uint64_t>(top_k), memory);
    head.ties = top_k - static_cast<int>(memory.above);
    __syncthreads();
  }
  if (top_p < 1.f) {
    for (int i = threadIdx.x; i < draw.vocab; i += kDrawThreads) before += draw.key(i) > head.key ? draw.weight(i) : 0;
    sum_before(before, total, memory);
    const float tied = expf((key_to_float(head.key) - draw.top) / draw.temperature) * kUnit;
    if (head.ties > 0) total += static_cast<uint64_t>(head.ties) * static_cast<uint64_t>(tied);
    uint64_t wanted = static_cast<uint64_t>(static_cast<double>(total) * top_p);
    wanted += static_cast<double>(wanted) < static_cast<double>(total) * top_p ? 1 : 0;
    if (wanted == 0) wanted = 1;
    const uint32_t key = find_key(draw, true, wanted, memory);
    const uint64_t each = static_cast<uint64_t>(expf((key_to_float(key) - draw.top) / draw.temperature) * kUnit);
    const uint64_t ties = each ? (wanted - memory.above + each - 1) / each : 1;
    __syncthreads();
    head.ties = key == head.key && ties > static_cast<uint64_t>(head.ties) ? head.ties : static_cast<int>(ties);
    head.key = key;
  }
  return head;
}

// The first id, in the order of the ids, at which the sum of the head's weights passes a random part of the whole.
INGOT_DEVICE void walk(const Draw& draw, const Head& head, uint32_t bits, int* token, DrawMemory& memory) {
  const int share = (draw.vocab + kDrawThreads - 1) / kDrawThreads;
  const int begin = min(draw.vocab, static_cast<int>(threadIdx.x) * share), end = min(draw.vocab, begin + share);
  uint64_t ties = 0, total;
  for (int i = begin; i < end; ++i) ties += draw.key(i) == head.key ? 1 : 0;
  const uint64_t ties_before = sum_before(ties, total, memory);
  const auto own_weight = [&](int i, uint64_t& rank) {
    const uint32_t key = draw.key(i);
    const bool inside = key > head.key || (key == head.key && rank < static_cast<uint64_t>(head.ties));
    rank += key == head.key ? 1 : 0;
    return inside ? draw.weight(i) : 0;
  };
  uint64_t rank = ties_before, sum = 0;
  for (int i = begin; i < end; ++i) sum += own_weight(i, rank);
  uint64_t running = sum_before(sum, total, memory);
  const uint64_t goal = (total >> 24) * bits + ((total & 0xffffff) * bits >> 24);
  if (running > goal || running + sum <= goal) return;  // another thread's share
  rank = ties_before;
  for (int i = begin; i < end; ++i) {
    running += own_weight(i, rank);
    if (running > goal) {
      *token = i;
      return;
    }
  }
}

// ids[q] and log_probs[q] of each draw q from logits[rows[q]]; log_probs are of the plain logits, NaN where they are
// not numbers. One block per draw.
INGOT_KERNEL(kDrawThreads)
draw_tokens(int* ids, float* log_probs, const float* logits, const int* rows, const float* temperatures,
            const int* top_ks, const float* top_ps, const uint64_t* seeds, const uint64_t* counters, int vocab) {
  __shared__ DrawMemory memory;
  __shared__ int token;
  const int q = blockIdx.x;
  const float* line = logits + static_cast<int64_t>(rows[q]) * vocab;
  const float lowest = __uint_as_float(0xff800000u);  // -infinity
  float top = lowest, odd = 0.f;                      // odd counts what is no number
  int place = vocab;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) {
    const float value = line[i];
    if (value != value) odd += 1.f;
    if (value > top) top = value, place = i;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, top, step);
    const int where = __shfl_xor_sync(kAllLanes, place, step);
    if (other > top || (other == top && where < place)) top = other, place = where;
  }
  if (threadIdx.x % kWarp == 0) memory.floats[threadIdx.x / kWarp] = top, memory.places[threadIdx.x / kWarp] = place;
  __syncthreads();
  for (int warp = 0; warp < kDrawThreads / kWarp; ++warp) {
    const float other = memory.floats[warp];
    if (other > top || (other == top && memory.places[warp] < place)) top = other, place = memory.places[warp];
  }
  __syncthreads();
  odd = block_sum<kDrawThreads>(odd, memory.floats);
  float total = 0.f;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) total += expf(line[i] - top);
  total = block_sum<kDrawThreads>(total, memory.floats);
  if (threadIdx.x == 0) token = place < vocab ? place : 0;
  const bool wrong = odd > 0.f || top == lowest || top - top != 0.f;  // the same in every thread
  if (!wrong && temperatures[q] > 0.f) {
    const Draw draw{line, vocab, top, temperatures[q]};
    const Head head = cut_head(draw, top_ks[q], top_ps[q], memory);
    walk(draw, head, random_bits(seeds[q], counters[q]), &token, memory);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ids[q] = token;
    log_probs[q] = wrong ? __uint_as_float(0x7fc00000u) : line[token] - top - logf(total);
  }
}
