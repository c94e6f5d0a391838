// One token for each draw, by the specification of the op `sample`: the sequence's rules change a copy of the logits,
// then greedy, or temperature, then min-p, top-k and top-p, then a walk over the remaining tokens in the order of their
// ids. Beside it the probability of the token, its rank and the most likely tokens, all under the plain logits.
//
// Weights are integers, exp((logit - highest) / temperature) in units of 2^-44, so that sums are exact and no order of
// additions matters. Most heads of the ranking are few tokens: a pass over the row gathers what is at least as likely
// as the n-th of the threads' own most likely tokens, and the head is found among these. Else a histogram of the
// distances to the highest logit leads to the few tokens that the head ends among; where many are equal, the digits of
// their order do.
#include "draw_rows.cuh"

constexpr int kDigits = 256;
constexpr float kUnit = 17592186044416.f;  // 2^44
constexpr int kFirst = 128;                // tokens, about, among which the head of a top-p is looked for first

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

// A row of logits that tokens are chosen from.
struct Line {
  const float* logits;  // [vocab]
  int vocab;
  float top;      // the highest logit
  float scale;    // binary logarithm of e, by temperature
  float dropped;  // the highest logit that min-p drops; NaN: none

  INGOT_DEVICE uint64_t weight(float logit) const {
    return logit <= dropped ? 0 : static_cast<uint64_t>(fast_exp2((logit - top) * scale) * kUnit);
  }
};

// A head of the ranking: every token above `value`, and of those at `value` the ids up to `last`.
struct Head {
  float value;
  int last;

  INGOT_DEVICE bool has(int id, float logit) const { return logit > value || (logit == value && id <= last); }
};

INGOT_DEVICE bool goes_ahead(float logit, int id, float than, int than_id) {
  return logit > than || (logit == than && id < than_id);
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

// The highest logit that min-p drops.
INGOT_DEVICE float find_dropped(float top, float temperature, double log_min_p, DrawMemory& memory) {
  if (threadIdx.x == 0) {  // few float64 divisions, which some GPUs are slow at
    const double bound = static_cast<double>(top) / temperature + log_min_p;
    uint32_t dropped = 0, kept = float_to_key(top);
    while (kept - dropped > 1) {
      const uint32_t middle = dropped + (kept - dropped) / 2;
      (static_cast<double>(key_to_float(middle)) / temperature >= bound ? kept : dropped) = middle;
    }
    memory.bound = key_to_float(dropped);
  }
  __syncthreads();
  const float dropped = memory.bound;
  __syncthreads();
  return dropped;
}

// The least sum of weights that a top-p keeps.
INGOT_DEVICE uint64_t part_of(uint64_t total, float top_p) {
  const double part = static_cast<double>(total) * top_p;
  uint64_t wanted = static_cast<uint64_t>(part);
  wanted += static_cast<double>(wanted) < part ? 1 : 0;
  return wanted == 0 ? 1 : wanted;
}
// Where a walk over weights ends.
INGOT_DEVICE uint64_t random_part(uint64_t total, uint32_t bits) {
  return (total >> 24) * bits + ((total & 0xffffff) * bits >> 24);
}

// The head in which the tokens' sum, of weights or of ones, reaches `wanted`: first the highest key such that the
// tokens at or above it do, 8 bits at a time, then the ids of those at it.
INGOT_DEVICE Head find_head_by_digits(const Line& line, bool weighted, uint64_t wanted, DrawMemory& memory) {
  uint32_t prefix = 0;
  uint64_t above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kBins; i += kDrawThreads) memory.histogram.low[i] = memory.histogram.high[i] = 0;
    __syncthreads();
    visit<4>(line.logits, line.vocab, [&](const Batch<4>& batch) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = float_to_key(batch.values[i]);
        if (batch.id(i) >= line.vocab || (shift < 24 && (key ^ prefix) >> (shift + 8))) continue;
        const uint64_t one = weighted ? line.weight(batch.values[i]) : 1;
        memory.histogram.add(kDigits - 1 - static_cast<int>(key >> shift & 0xff), one);
      }
    });
    __syncthreads();
    const int bin = min(find_bin(wanted - above, memory), kDigits - 1);
    above += memory.above;
    prefix |= static_cast<uint32_t>(kDigits - 1 - bin) << shift;
    __syncthreads();
  }
  const float value = key_to_float(prefix);
  const uint64_t each = weighted ? line.weight(value) : 1, missing = wanted - above;
  const auto tied = [&](int id, float logit) { return id < line.vocab && logit == value ? each : 0; };
  return {value, walk(line.logits, line.vocab, tied, [&](uint64_t) { return missing - 1; }, memory)};
}

// The same where tokens of no weight do not matter: by a histogram of the distances to the highest logit, then one of
// its bin that the head ends in, until few tokens are left.
INGOT_DEVICE Head find_head(const Line& line, bool weighted, uint64_t wanted, DrawMemory& memory) {
  constexpr int kLevels = 2;
  constexpr float kFarthest = 32.f * kLog2e;  // no token there has a weight
  const float per_bin = line.scale * (kBins / kFarthest);
  float from = 0.f, finer = 1.f;
  uint64_t above = 0;
  for (int level = 0; level < kLevels; ++level) {
    const auto place = [&](float logit) { return (__fmul_rn(line.top - logit, per_bin) - from) * finer; };
    for (int i = threadIdx.x; i < kBins; i += kDrawThreads) memory.histogram.low[i] = memory.histogram.high[i] = 0;
    __syncthreads();
    visit<kWeighing>(line.logits, line.vocab, [&](const Batch<kWeighing>& batch) {
#pragma unroll
      for (int i = 0; i < kWeighing; ++i) {
        const float at = place(batch.values[i]);
        if (at >= 0.f && at < kBins) {
          memory.histogram.add(static_cast<int>(at), weighted ? line.weight(batch.values[i]) : 1);
        }
      }
    });
    __syncthreads();
    const int bin = find_bin(wanted - above, memory);
    if (bin == kBins) return {minus_infinity(), -1};
    // How many tokens there are in it, about: the first bins are narrow, so that their tokens weigh the same.
    float number = static_cast<float>(memory.histogram.sum(bin));
    if (weighted) number /= kUnit * fast_exp2(-(static_cast<float>(bin) + 0.5f) * (kFarthest / kBins));
    const bool many = level == 0 && number > 1.1f * kDrawThreads;
    const uint64_t before_bin = memory.above;
    __syncthreads();
    const float begin = static_cast<float>(bin), end = begin + 1.f;
    const auto inside = [&](int, float logit) {
      const float at = place(logit);
      return at >= begin && at < end;
    };
    above += before_bin;
    if (!many) gather(line.logits, line.vocab, inside, false, [](float) { return uint64_t{0}; }, memory);
    const int count = many ? kDrawThreads + 1 : static_cast<int>(memory.count);
    if (count <= kDrawThreads) {
      Candidates& found = memory.candidates;
      const int me = threadIdx.x;
      const uint64_t mine = me < count && weighted ? line.weight(found.values[me]) : 1;
      if (me < count) found.weights[me] = mine;
      __syncthreads();
      if (me < count) {
        uint64_t before = above;
        for (int j = 0; j < count; ++j) {
          if (goes_ahead(found.values[j], found.ids[j], found.values[me], found.ids[me])) before += found.weights[j];
        }
        if (before < wanted && before + mine >= wanted) memory.bin = me;
      }
      __syncthreads();
      const Head head{found.values[memory.bin], found.ids[memory.bin]};
      __syncthreads();
      return head;
    }
    from = static_cast<float>(bin), finer = kBins;
    __syncthreads();
  }
  return find_head_by_digits(line, weighted, wanted, memory);
}

// The token that a walk over the head among the candidates finds; -1 where the head has more tokens than these. total:
// the weights of all tokens, where there is no top_k.
INGOT_DEVICE int pick_candidate(const Line& line, int top_k, float top_p, uint64_t total, uint32_t bits,
                                DrawMemory& memory) {
  Candidates& found = memory.candidates;
  const int count = static_cast<int>(memory.count), me = threadIdx.x;  // one candidate for each thread
  const bool has_one = me < count;
  uint64_t mine = has_one ? line.weight(found.values[me]) : 0, before = 0;
  if (has_one) found.weights[me] = mine;
  __syncthreads();
  if (has_one) {
    const float value = found.values[me];
    const int id = found.ids[me];
    int ahead = 0;
    for (int j = 0; j < count; ++j) {
      if (!goes_ahead(found.values[j], found.ids[j], value, id)) continue;
      ++ahead;
      before += found.weights[j];
    }
    if (top_k > 0 && ahead >= top_k) mine = 0;
  }
  if (top_p < 1.f) {
    const uint64_t kept = sum_of_all(mine, memory), wanted = part_of(top_k == 0 ? total : kept, top_p);
    if (kept < wanted) return -1;
    if (before >= wanted) mine = 0;
  }
  const uint64_t goal = random_part(sum_of_all(mine, memory), bits);  // behind its barriers no weight is read any more
  if (has_one) found.weights[me] = mine;
  __syncthreads();
  if (mine > 0) {
    const int id = found.ids[me];
    uint64_t running = 0;
    for (int j = 0; j < count; ++j) running += found.ids[j] < id ? found.weights[j] : 0;
    if (running <= goal && running + mine > goal) memory.picked = id;
  }
  __syncthreads();
  return memory.picked;
}

// One token, by a walk over those that top-k and top-p leave in the order of their ids. own: of the thread's logits the
// highest.
INGOT_DEVICE int choose(const Line& line, const Draw& draw, float own, DrawMemory& memory) {
  constexpr float kLeast = -3.4e38f;
  const uint32_t bits = random_bits(draw.seed, draw.counter);
  const int top_k = draw.top_k < line.vocab ? draw.top_k : 0;
  const float top_p = draw.top_p;
  Head head{minus_infinity(), -1};
  uint64_t total = 0;
  if (top_k > 0 || top_p < 1.f) {
    const bool few = top_k <= kDrawThreads / 2;
    if (few) {
      const float bound = fmaxf(bound_of_highest(own, line.top, top_k > 0 ? top_k : kFirst, memory), kLeast);
      const auto likely = [&](int, float logit) { return logit >= bound; };
      const auto weight = [&](float logit) { return line.weight(logit); };
      total = gather(line.logits, line.vocab, likely, top_k == 0, weight, memory);
      if (memory.count <= kDrawThreads) {
        const int token = pick_candidate(line, top_k, top_p, total, bits, memory);
        if (token >= 0) return token;
      }
      __syncthreads();
    }
    uint64_t wanted = static_cast<uint64_t>(top_k);
    for (int weighted = top_k > 0 ? 0 : 1; weighted < (top_p < 1.f ? 2 : 1); ++weighted) {
      if (weighted) {
        if (top_k > 0) {
          uint64_t sum = 0;
          visit<4>(line.logits, line.vocab, [&](const Batch<4>& batch) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (head.has(batch.id(i), batch.values[i])) sum += line.weight(batch.values[i]);
            }
          });
          total = sum_of_all(sum, memory);
        }
        wanted = part_of(total, top_p);
      }
      head = find_head(line, weighted != 0, wanted, memory);
    }
  }
  const auto weight = [&](int id, float logit) { return head.has(id, logit) ? line.weight(logit) : 0; };
  return walk(line.logits, line.vocab, weight, [&](uint64_t sum) { return random_part(sum, bits); }, memory);
}

// What the rules make of the logits: mask, biases, then penalties, each operation rounded by itself. counts [vocab] are
// zeros, before and after: a token's number among the generated ones, and whether it was seen at all.
INGOT_DEVICE void apply_rules(const Draw& draw, const float* logits, float* line, uint32_t* counts, const int* lists,
                              const int* history, int vocab) {
  constexpr uint32_t kSeen = 0x80000000u;
  for (int i = threadIdx.x; i < vocab; i += kDrawThreads) {
    const bool within = draw.mask_words < 0 || i / 32 < draw.mask_words;
    const bool allowed = within && (draw.mask_words < 0 || lists[draw.mask + i / 32] >> i % 32 & 1);
    line[i] = allowed ? logits[i] : minus_infinity();
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
  uint32_t ahead = 0;
  visit<kBatch>(logits, vocab, [&](const Batch<kBatch>& batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) ahead += goes_ahead(batch.values[i], batch.id(i), own, token) ? 1 : 0;
  });
  return static_cast<int>(sum_of_all(ahead, memory)) + 1;
}

// The `count` most likely tokens, best first, into ids[count]. own: of the thread's logits the highest.
INGOT_DEVICE void most_likely(const Line& line, int count, float own, int* ids, DrawMemory& memory) {
  const auto nothing = [](float) { return uint64_t{0}; };
  Head head{minus_infinity(), -1};
  if (count <= kDrawThreads / 2) head = {bound_of_highest(own, line.top, count, memory), line.vocab};
  for (bool again = false;; again = true) {
    if (head.value == minus_infinity()) {
      head = find_head_by_digits(line, false, static_cast<uint64_t>(count), memory);
      again = true;
    }
    gather(line.logits, line.vocab, [&](int id, float logit) { return head.has(id, logit); }, false, nothing, memory);
    if (again || memory.count <= kCandidates) break;
    head.value = minus_infinity();
    __syncthreads();
  }
  const Candidates& all = memory.candidates;
  const int some = min(static_cast<int>(memory.count), kCandidates);
  for (int i = threadIdx.x; i < some; i += kDrawThreads) {
    int ahead = 0;
    for (int j = 0; j < some; ++j) ahead += goes_ahead(all.values[j], all.ids[j], all.values[i], all.ids[i]) ? 1 : 0;
    if (ahead < count) ids[ahead] = all.ids[i];
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
  const int q = first + static_cast<int>(blockIdx.x);
  const Draw& draw = draws[q];
  int* history = histories + static_cast<int64_t>(max(draw.slot, 0)) * capacity;
  const float* plain = logits + static_cast<int64_t>(draw.row) * vocab;
  const auto log_prob = [&](int id) { return plain[id] - memory.plain_top - memory.plain_log; };
  const float* changed = plain;
  Summary summary;
  for (bool again = false;; again = true) {
    if (again) {
      float* line = lines + static_cast<int64_t>(draw.line) * vocab;
      apply_rules(draw, plain, line, counts + static_cast<int64_t>(draw.line) * vocab, lists, history, vocab);
      __syncthreads();
      changed = line;
    }
    summary = summarise(changed, vocab, memory);
    if (again) break;
    if (threadIdx.x == 0) {
      memory.plain_top = summary.top, memory.plain_log = summary.wrong ? not_a_number() : logf(summary.total);
    }
    if (draw.num_top > 0) {
      int* ids = results + draw.top;
      most_likely({plain, vocab, summary.top, kLog2e, not_a_number()}, draw.num_top, summary.own, ids, memory);
      for (int i = threadIdx.x; i < draw.num_top; i += kDrawThreads)
        ids[draw.num_top + i] = static_cast<int>(__float_as_uint(log_prob(ids[i])));
    }
    if (draw.line < 0 || summary.wrong) break;
  }
  const bool none = summary.wrong && changed != plain;  // the same in every thread
  int token = draw.known >= 0 ? draw.known : none ? -1 : summary.place;
  if (draw.known < 0 && !summary.wrong && draw.temperature > 0.f) {
    float dropped = not_a_number();
    if (draw.log_min_p >= -1e30) dropped = find_dropped(summary.top, draw.temperature, draw.log_min_p, memory);
    const float scale = fminf(kLog2e / draw.temperature, 1e30f);  // finite: weights are numbers
    token = choose({changed, vocab, summary.top, scale, dropped}, draw, summary.own, memory);
  }
  __syncthreads();
  const int rank = draw.num_top >= 0 && token >= 0 ? rank_of(plain, vocab, token, memory) : 0;
  if (threadIdx.x == 0) {
    results[3 * q] = token;
    results[3 * q + 1] = static_cast<int>(__float_as_uint(token >= 0 ? log_prob(token) : minus_infinity()));
    results[3 * q + 2] = rank;
    if (draw.slot >= 0) drawn[draw.slot] = max(token, 0);
    if (draw.length > 0) history[draw.length] = max(token, 0);
  }
}
