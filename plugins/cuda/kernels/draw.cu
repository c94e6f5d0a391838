// One token for each draw, by the specification of the op `sample`: the sequence's rules change a copy of the logits,
// then greedy, or temperature, then min-p, top-k and top-p, then a walk over the remaining tokens in the order of their
// ids. Beside it the probability of the token, its rank and the most likely tokens, all under the plain logits.
//
// Weights are integers, exp((logit - highest) / temperature) in units of 2^-44, so that sums are exact and no order of
// additions matters. Heads of the ranking are found digit by digit, 8 bits of the logits' order at a time.
#include "device.cuh"

constexpr int kDrawThreads = 512;
constexpr int kDigits = 256;
constexpr float kUnit = 17592186044416.f;  // 2^44

INGOT_DEVICE float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

// What is wanted of one row of logits. The host packs it (sampling.py), and lists behind it.
struct Draw {
  int row;
  float temperature;
  int top_k;
  float top_p;
  uint64_t seed, counter;
  double log_min_p;  // minus infinity: all tokens
  float repetition, frequency, presence;
  int biases, num_biases;        // in the lists: as many ids, ascending, then as many float32
  int mask, mask_words;          // in the lists: a bit per token; fewer than 0: all are allowed
  int slot, length, num_prompt;  // of the sequence; length: its tokens, where they matter to the logits, else 0
  int known;                     // the token; fewer than 0: one is drawn
  int top, num_top;              // in the results: as many ids, then as many float32; fewer than 0: not even a rank
  int line;                      // of scratch, for what the rules make of the logits; fewer than 0: they change nothing
};
static_assert(sizeof(Draw) == 96);

// Floats in their order as unsigned numbers.
INGOT_DEVICE uint32_t float_to_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 counts as 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INGOT_DEVICE float key_to_float(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// A row of logits that tokens are chosen from.
struct Line {
  const float* logits;  // [vocab]
  int vocab;
  float top;  // the highest logit
  float temperature;

  INGOT_DEVICE uint32_t key(int i) const { return float_to_key(logits[i]); }
  INGOT_DEVICE uint64_t weight(int i) const {
    return static_cast<uint64_t>(expf((logits[i] - top) / temperature) * kUnit);
  }
};

// A head of the ranking: every token above `key`, and the first `ties` ids of those at `key`.
struct Head {
  uint32_t key;
  int ties;
};

struct DrawMemory {
  float floats[kDrawThreads / kWarp];
  int places[kDrawThreads / kWarp];
  uint32_t low[kDigits], high[kDigits];  // sums of 64 bits, for which 32-bit additions are native
  uint64_t parts[kDrawThreads];
  uint64_t above;
  uint32_t key;

  INGOT_DEVICE void add(uint32_t digit, uint64_t value) {
    const uint32_t added = static_cast<uint32_t>(value), before = atomicAdd(&low[digit], added);
    const uint32_t carried = static_cast<uint32_t>(value >> 32) + (before + added < before ? 1 : 0);
    if (carried) atomicAdd(&high[digit], carried);
  }
  INGOT_DEVICE uint64_t sum(int digit) const { return static_cast<uint64_t>(high[digit]) << 32 | low[digit]; }
};

// The highest key such that the tokens at or above it reach `wanted` in sum: of ones, or of weights. memory.above: the
// sum of those strictly above it, until the threads have met again.
INGOT_DEVICE uint32_t find_key(const Line& line, bool weighted, uint64_t wanted, DrawMemory& memory) {
  if (threadIdx.x == 0) memory.above = 0, memory.key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kDrawThreads) memory.low[i] = memory.high[i] = 0;
    __syncthreads();
    const uint32_t prefix = memory.key;
    for (int i = threadIdx.x; i < line.vocab; i += kDrawThreads) {
      const uint32_t key = line.key(i);
      if (shift < 24 && (key ^ prefix) >> (shift + 8)) continue;
      memory.add(key >> shift & 0xff, weighted ? line.weight(i) : 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      uint64_t above = memory.above;
      while (digit > 0 && above + memory.sum(digit) < wanted) above += memory.sum(digit--);
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

// The highest key of a token that min-p drops.
INGOT_DEVICE uint32_t dropped_key(const Line& line, double log_min_p, DrawMemory& memory) {
  if (threadIdx.x == 0) {  // few float64 divisions, which some GPUs are slow at
    const double bound = static_cast<double>(line.top) / line.temperature + log_min_p;
    uint32_t dropped = 0, kept = float_to_key(line.top);
    while (kept - dropped > 1) {
      const uint32_t middle = dropped + (kept - dropped) / 2;
      (static_cast<double>(key_to_float(middle)) / line.temperature >= bound ? kept : dropped) = middle;
    }
    memory.key = dropped;
  }
  __syncthreads();
  const uint32_t key = memory.key;
  __syncthreads();
  return key;
}

INGOT_DEVICE Head cut_head(const Line& line, const Draw& draw, DrawMemory& memory) {
  Head head{0, 0};  // every key is above 0
  uint64_t total, before = 0;
  if (draw.log_min_p >= -1e30) head.key = dropped_key(line, draw.log_min_p, memory);
  if (draw.top_k > 0 && draw.top_k < line.vocab) {
    const uint32_t key = find_key(line, false, static_cast<uint64_t>(draw.top_k), memory);
    if (key > head.key) head = {key, draw.top_k - static_cast<int>(memory.above)};
    __syncthreads();
  }
  if (draw.top_p < 1.f) {
    for (int i = threadIdx.x; i < line.vocab; i += kDrawThreads) before += line.key(i) > head.key ? line.weight(i) : 0;
    sum_before(before, total, memory);
    const float tied = expf((key_to_float(head.key) - line.top) / line.temperature) * kUnit;
    if (head.ties > 0) total += static_cast<uint64_t>(head.ties) * static_cast<uint64_t>(tied);
    uint64_t wanted = static_cast<uint64_t>(static_cast<double>(total) * draw.top_p);
    wanted += static_cast<double>(wanted) < static_cast<double>(total) * draw.top_p ? 1 : 0;
    if (wanted == 0) wanted = 1;
    const uint32_t key = find_key(line, true, wanted, memory);
    const uint64_t each = static_cast<uint64_t>(expf((key_to_float(key) - line.top) / line.temperature) * kUnit);
    const uint64_t ties = each ? (wanted - memory.above + each - 1) / each : 1;
    __syncthreads();
    head.ties = key == head.key && ties > static_cast<uint64_t>(head.ties) ? head.ties : static_cast<int>(ties);
    head.key = key;
  }
  return head;
}

// The ids that a thread looks at where their order counts.
struct Share {
  int begin, end;

  INGOT_DEVICE explicit Share(int vocab) {
    const int size = (vocab + kDrawThreads - 1) / kDrawThreads;
    begin = min(vocab, static_cast<int>(threadIdx.x) * size), end = min(vocab, begin + size);
  }
};

INGOT_DEVICE uint64_t ties_before(const Line& line, const Share& share, uint32_t key, DrawMemory& memory) {
  uint64_t ties = 0, total;
  for (int i = share.begin; i < share.end; ++i) ties += line.key(i) == key ? 1 : 0;
  return sum_before(ties, total, memory);
}

// Whether a token is in the head. rank: how many ids below it tie with the head's key; is counted on.
INGOT_DEVICE bool inside(const Line& line, const Head& head, int i, uint64_t& rank) {
  const uint32_t key = line.key(i);
  return key > head.key || (key == head.key && rank++ < static_cast<uint64_t>(head.ties));
}

// The first id, in the order of the ids, at which the sum of the head's weights passes a random part of the whole.
INGOT_DEVICE void walk(const Line& line, const Head& head, uint32_t bits, int* token, DrawMemory& memory) {
  const Share share(line.vocab);
  const uint64_t first_rank = ties_before(line, share, head.key, memory);
  uint64_t rank = first_rank, sum = 0, total;
  for (int i = share.begin; i < share.end; ++i) sum += inside(line, head, i, rank) ? line.weight(i) : 0;
  uint64_t running = sum_before(sum, total, memory);
  const uint64_t goal = (total >> 24) * bits + ((total & 0xffffff) * bits >> 24);
  if (running > goal || running + sum <= goal) return;  // another thread's share
  rank = first_rank;
  for (int i = share.begin; i < share.end; ++i) {
    running += inside(line, head, i, rank) ? line.weight(i) : 0;
    if (running > goal) {
      *token = i;
      return;
    }
  }
}

// The highest of a row of logits, and the lowest id that has it. wrong: the row is no distribution.
struct Summary {
  float top;
  int place;
  bool wrong;
};

INGOT_DEVICE Summary summarise(const float* logits, int vocab, DrawMemory& memory) {
  float top = lowest(), odd = 0.f;  // odd counts what is no number
  int place = vocab;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) {
    const float value = logits[i];
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
  return {top, place < vocab ? place : 0, odd > 0.f || top - top != 0.f};  // of infinities too this is no number
}

// What the rules make of the logits: mask, biases, then penalties, each operation rounded by itself. counts [vocab] are
// zeros, before and after: a token's number among the generated ones, and whether it was seen at all.
INGOT_DEVICE void apply_rules(const Draw& draw, const float* logits, float* line, uint32_t* counts, const int* lists,
                              const int* history, int vocab) {
  constexpr uint32_t kSeen = 0x80000000u;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) {
    const bool within = draw.mask_words < 0 || i / 32 < draw.mask_words;
    const bool allowed = within && (draw.mask_words < 0 || lists[draw.mask + i / 32] >> i % 32 & 1);
    line[i] = allowed ? logits[i] : lowest();
  }
  __syncthreads();
  const int* ids = lists + draw.biases;
  for (int i = threadIdx.x; i < draw.num_biases; i += kDrawThreads) {
    if (i > 0 && ids[i - 1] == ids[i]) continue;  // all of a token are added by one thread, in their order
    float value = line[ids[i]];
    for (int j = i; j < draw.num_biases && ids[j] == ids[i]; ++j)
      value = __fadd_rn(value, __uint_as_float(static_cast<uint32_t>(ids[draw.num_biases + j])));
    line[ids[i]] = value;
  }
  if (draw.length == 0) return;
  __syncthreads();
  for (int i = threadIdx.x; i < draw.length; i += kDrawThreads) {
    if (i < draw.num_prompt) {
      atomicOr(&counts[history[i]], kSeen);
    } else {
      atomicAdd(&counts[history[i]], 1u);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < draw.length; i += kDrawThreads) {
    const uint32_t count = atomicExch(&counts[history[i]], 0u), generated = count & ~kSeen;
    if (count == 0) continue;  // another thread has the token
    const float given = line[history[i]];
    float value = given > 0.f ? __fdiv_rn(given, draw.repetition) : __fmul_rn(given, draw.repetition);
    if (generated > 0) {
      value = __fsub_rn(value, __fmul_rn(draw.frequency, static_cast<float>(generated)));
      value = __fsub_rn(value, draw.presence);
    }
    line[history[i]] = value;
  }
}

// Of a token among all: 1 is the most likely, of ties that with the lowest id.
INGOT_DEVICE int rank_of(const float* logits, int vocab, int token, DrawMemory& memory) {
  const float own = logits[token];
  uint64_t ahead = 0, total;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) {
    ahead += logits[i] > own || (logits[i] == own && i < token) ? 1 : 0;
  }
  sum_before(ahead, total, memory);
  return static_cast<int>(total) + 1;
}

// The `count` most likely tokens, best first, into ids[count]; `unsorted` has room for as many.
INGOT_DEVICE void most_likely(const Line& line, int count, int* ids, int* unsorted, DrawMemory& memory) {
  Head head;
  head.key = find_key(line, false, static_cast<uint64_t>(count), memory);
  head.ties = count - static_cast<int>(memory.above);
  __syncthreads();
  const Share share(line.vocab);
  const uint64_t first_rank = ties_before(line, share, head.key, memory);
  uint64_t rank = first_rank, found = 0, total;
  for (int i = share.begin; i < share.end; ++i) found += inside(line, head, i, rank) ? 1 : 0;
  uint64_t place = sum_before(found, total, memory);
  rank = first_rank;
  for (int i = share.begin; i < share.end; ++i) {
    if (inside(line, head, i, rank)) unsorted[place++] = i;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kDrawThreads) {
    const uint32_t key = line.key(unsorted[i]);
    int ahead = 0;  // the order of the ids is kept among equals
    for (int j = 0; j < count; ++j) ahead += line.key(unsorted[j]) > key || (line.key(unsorted[j]) == key && j < i);
    ids[ahead] = unsorted[i];
  }
  __syncthreads();
}

// results[3 * q] of each draw q: token, log probability (float32), rank; behind those of all draws the most likely
// tokens. The token is -1 where the rules leave none; probabilities are NaN where logits are no numbers. A drawn token
// is the last one of its slot, and the next in the slot's history [capacity], where that is kept; 0 stands for none.
// One block per draw, the first of which is `first`.
INGOT_KERNEL(kDrawThreads)
draw_tokens(int* results, const float* logits, const Draw* draws, const int* lists, int* drawn, int* histories,
            int capacity, float* lines, uint32_t* counts, int first, int vocab) {
  __shared__ DrawMemory memory;
  __shared__ int token;
  const int q = first + static_cast<int>(blockIdx.x);
  const Draw draw = draws[q];
  int* history = histories + static_cast<int64_t>(max(draw.slot, 0)) * capacity;
  const float* plain = logits + static_cast<int64_t>(draw.row) * vocab;
  const Summary of_plain = summarise(plain, vocab, memory);
  float total = 0.f;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) total += expf(plain[i] - of_plain.top);
  total = block_sum<kDrawThreads>(total, memory.floats);
  Summary summary = of_plain;
  const float* changed = plain;
  if (draw.line >= 0 && !of_plain.wrong) {
    float* line = lines + static_cast<int64_t>(draw.line) * vocab;
    apply_rules(draw, plain, line, counts + static_cast<int64_t>(draw.line) * vocab, lists, history, vocab);
    __syncthreads();
    summary = summarise(line, vocab, memory);
    changed = line;
  }
  const bool none = summary.wrong && !of_plain.wrong;  // the same in every thread
  if (threadIdx.x == 0) token = draw.known >= 0 ? draw.known : none ? -1 : summary.place;
  if (draw.known < 0 && !summary.wrong && draw.temperature > 0.f) {
    const Line line{changed, vocab, summary.top, draw.temperature};
    const Head head = cut_head(line, draw, memory);
    walk(line, head, random_bits(draw.seed, draw.counter), &token, memory);
  }
  __syncthreads();
  const int chosen = token;
  const auto log_prob = [&](int id) {
    return of_plain.wrong ? __uint_as_float(0x7fc00000u) : plain[id] - of_plain.top - logf(total);
  };
  const int rank = draw.num_top >= 0 && chosen >= 0 ? rank_of(plain, vocab, chosen, memory) : 0;
  if (draw.num_top > 0) {
    int* ids = results + draw.top;
    most_likely({plain, vocab, of_plain.top, 1.f}, draw.num_top, ids, ids + draw.num_top, memory);
    for (int i = threadIdx.x; i < draw.num_top; i += kDrawThreads)
      ids[draw.num_top + i] = static_cast<int>(__float_as_uint(log_prob(ids[i])));
  }
  if (threadIdx.x == 0) {
    results[3 * q] = chosen;
    results[3 * q + 1] = static_cast<int>(__float_as_uint(chosen >= 0 ? log_prob(chosen) : lowest()));
    results[3 * q + 2] = rank;
    if (draw.slot >= 0) drawn[draw.slot] = max(chosen, 0);
    if (draw.length > 0) history[draw.length] = max(chosen, 0);
  }
}
