// One token per draw: the algorithm of plugins/ops/sample.py. Draws are shared among threads. A greedy draw reads its
// row twice; a random one weighs every token in float64 and sorts only what min-p, top-k or top-p may keep. Rules work
// on a copy of the row, and only draws that have some pay for it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "ingot/kernel.h"
#include "isa/simd_lanes.h"
#include "isa/simd_math.h"
#include "sampling/sample_args.h"

namespace ingot {
namespace {

// Float in [0, 1) with 24 random bits: the first word of Philox4x32-10(key = seed, counter).
double philox_uniform(uint64_t seed, uint64_t counter) {
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t state[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t wide0 = uint64_t{0xD2511F53} * state[0], wide1 = uint64_t{0xCD9E8D57} * state[2];
    state[0] = static_cast<uint32_t>(wide1 >> 32) ^ state[1] ^ key0;
    state[2] = static_cast<uint32_t>(wide0 >> 32) ^ state[3] ^ key1;
    state[1] = static_cast<uint32_t>(wide1);
    state[3] = static_cast<uint32_t>(wide0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return (state[0] >> 8) * 0x1p-24;
}

// e^x for x <= 0 within 2 ulp, 0 below -708; branch-free, so that loops over it become vectors.
[[gnu::always_inline]] inline double exp_f64(double x) {
  const double inside = x > -708.0 ? x : -708.0;
  const double shifted = std::fma(inside, 1.4426950408889634, 0x1.8p52);  // the integer is in the low bits
  const double n = shifted - 0x1.8p52;
  const double r = std::fma(n, -0x1.abc9e3b39803fp-56, std::fma(n, -0x1.62e42fefa39efp-1, inside));
  double p = std::fma(r, 1.0 / 6227020800, 1.0 / 479001600);  // Taylor to r^13, |r| <= ln 2 / 2; written out, since
  p = std::fma(p, r, 1.0 / 39916800);                         // GCC makes no vectors of a loop inside the loop
  p = std::fma(p, r, 1.0 / 3628800);
  p = std::fma(p, r, 1.0 / 362880);
  p = std::fma(p, r, 1.0 / 40320);
  p = std::fma(p, r, 1.0 / 5040);
  p = std::fma(p, r, 1.0 / 720);
  p = std::fma(p, r, 1.0 / 120);
  p = std::fma(p, r, 1.0 / 24);
  p = std::fma(p, r, 1.0 / 6);
  p = std::fma(p, r, 0.5);
  p = std::fma(p, r, 1.0);
  p = std::fma(p, r, 1.0);
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(shifted) << 52));
  return x > -708.0 ? power : 0.0;
}

struct RowSummary {
  int32_t best;    // lowest index of the maximum; of the first NaN where there is one (as in argmax)
  double log_sum;  // log(sum(exp(logits - max))), 0 where nobody wants it
  bool finite;     // no NaN and a finite maximum: the row is a distribution
};

// f(vector, which of four to gather it in) of [begin, end) of a row; lanes beyond the end are minus infinity.
template <typename S, typename F>
[[gnu::always_inline]] inline void each_vector(const float* row, int64_t begin, int64_t end, F f) {
  int64_t at = begin;
  for (; at + 4 * S::kWidth <= end; at += 4 * S::kWidth)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) f(S::load(row + at + i * S::kWidth), i);
  for (; at < end; at += S::kWidth) {
    const int64_t left = std::min<int64_t>(end - at, S::kWidth);
    f(S::select(S::first_lanes(left), load_lanes<S>(row + at, left), S::set1(-std::numeric_limits<float>::infinity())),
      0);
  }
}

template <typename S, bool kSums = true>
RowSummary summarise(const float* logits, int64_t vocab) {
  using V = typename S::V;
  constexpr int64_t kPart = 1024;  // float32 sums stay short, and so does the way to the maximum
  float top = -std::numeric_limits<float>::infinity();
  int64_t best = 0;  // the first number of the part that has the maximum
  for (int64_t part = 0; part < vocab; part += kPart) {
    V tops[4] = {S::set1(top), S::set1(top), S::set1(top), S::set1(top)};
    each_vector<S>(logits, part, std::min(part + kPart, vocab),
                   [&](V x, int i) __attribute__((always_inline)) { tops[i] = S::max(tops[i], x); });
    const float most = S::reduce_max(S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3])));
    if (most > top) {
      top = most;
      best = part;
    }
  }
  const V highest = S::set1(top), lowest = S::set1(std::numeric_limits<float>::lowest());
  double sum = 0;
  for (int64_t part = 0; part < vocab; part += kPart) {
    V sums[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    each_vector<S>(logits, part, std::min(part + kPart, vocab), [&](V x, int i) __attribute__((always_inline)) {
      // without sums: 0, or NaN for a NaN or infinity
      sums[i] = S::add(sums[i], kSums ? exp_weight<S>(S::sub(x, highest)) : S::mul(S::max(lowest, x), S::zero()));
    });
    sum += static_cast<double>(S::reduce_add(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))));
  }
  const bool finite = std::isfinite(sum) && std::isfinite(top);
  if (finite) {
    while (logits[best] != top) ++best;
  } else {
    best = 0;
    for (int64_t i = 0; i < vocab && !std::isnan(logits[best]); ++i)
      if (std::isnan(logits[i]) || logits[i] > logits[best]) best = i;
  }
  return {static_cast<int32_t>(best), kSums ? std::log(sum) : 0, finite};
}

constexpr int64_t kChunk = 512;  // tokens whose weights are summed together

// Scratch of one draw, each [vocab].
struct DrawSpace {
  double* scaled;
  double* weights;
  double* sums;   // of kChunk weights each
  float* logits;  // after the rules
  int32_t* order;
  int32_t* counts;
};

DrawSpace draw_space(const Team& team, int64_t vocab) {
  const auto n = static_cast<size_t>(vocab);
  const size_t chunks = n / kChunk + 1;
  auto* memory = reinterpret_cast<double*>(
      team.scratch((2 * n + chunks) * sizeof(double) + n * (sizeof(float) + 2 * sizeof(int32_t))));
  auto* narrow = reinterpret_cast<int32_t*>(memory + 2 * n + chunks);
  return {memory, memory + n, memory + 2 * n, reinterpret_cast<float*>(narrow + 2 * n), narrow, narrow + n};
}

// The row with minus infinity for what is not allowed.
void apply_mask(const uint32_t* allowed, int64_t vocab, const float* logits, float* line) {
  constexpr int64_t kBits = 32;
  const auto masked = [&](int64_t word, int64_t i) {
    const float x = logits[word * kBits + i];
    line[word * kBits + i] = (allowed[word] >> i & 1) != 0 ? x : -std::numeric_limits<float>::infinity();
  };
  const int64_t whole = vocab / kBits;
  for (int64_t word = 0; word < whole; ++word)
    for (int64_t i = 0; i < kBits; ++i) masked(word, i);  // as many each time, so that it becomes vectors
  for (int64_t i = 0; i < vocab % kBits; ++i) masked(whole, i);
}

// The one token that a mask allows; -1 where it allows none or more.
int32_t only_allowed(const uint32_t* allowed, int64_t vocab) {
  const uint32_t* const end = allowed + (vocab + 31) / 32;
  const auto is_set = [](uint32_t word) { return word != 0; };
  const uint32_t* const first = std::find_if(allowed, end, is_set);
  if (first == end || !std::has_single_bit(*first) || std::find_if(first + 1, end, is_set) != end) return -1;
  const int64_t token = (first - allowed) * 32 + std::countr_zero(*first);
  return token < vocab ? static_cast<int32_t>(token) : -1;
}

// The row with mask, biases and penalties in space.logits.
void apply_rules(const Draw& draw, const uint32_t* allowed, int64_t vocab, const float* logits,
                 const DrawSpace& space) {
  float* line = space.logits;
  if (allowed == nullptr)
    std::copy_n(logits, vocab, line);
  else
    apply_mask(allowed, vocab, logits, line);
  for (int64_t i = 0; i < draw.num_biases; ++i) line[draw.bias_ids[i]] += draw.bias[i];
  const std::span tokens(draw.history, static_cast<size_t>(draw.history_length));
  if (tokens.empty()) return;
  std::fill_n(space.counts, vocab, 0);
  for (const int32_t token : tokens) {
    if (std::exchange(space.counts[token], 1) != 0) continue;
    float& x = line[token];
    x = x > 0 ? x / draw.repetition_penalty : x * draw.repetition_penalty;
  }
  for (const int32_t token : tokens) space.counts[token] = 0;
  const auto generated = tokens.subspan(static_cast<size_t>(draw.num_prompt));
  for (const int32_t token : generated) ++space.counts[token];
  for (const int32_t token : generated) {
    const int32_t count = std::exchange(space.counts[token], 0);
    if (count == 0) continue;
    line[token] -= draw.frequency_penalty * static_cast<float>(count);
    line[token] -= draw.presence_penalty;
  }
}

template <typename T>
auto likelier(const T* values) {
  return [values](int32_t a, int32_t b) { return values[a] > values[b] || (values[a] == values[b] && a < b); };
}

// The tokens for which keep(i) holds go to space.order, in id order; returns how many they are.
template <typename Keep>
int64_t collect(const DrawSpace& space, int64_t vocab, Keep keep) {
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    space.order[count] = static_cast<int32_t>(i);
    count += keep(i);
  }
  return count;
}

// The head of all tokens whose weight reaches top_p. Only those about as likely as its last one are sorted: weights are
// summed per 1/32 of scaled logit first.
int64_t keep_head(const DrawSpace& space, int64_t vocab, double top, double top_p) {
  constexpr int32_t kBuckets = 4096;
  const double* scaled = space.scaled;
  const auto bucket = [&](int64_t i) {
    const double below = (top - scaled[i]) * 32;
    return below < kBuckets - 1 ? static_cast<int32_t>(below) : kBuckets - 1;
  };
  double buckets[kBuckets] = {}, total = 0, running = 0;
  for (int64_t i = 0; i < vocab; ++i) buckets[bucket(i)] += space.weights[i];
  for (int64_t i = 0; i <= (vocab - 1) / kChunk; ++i) total += space.sums[i];
  int32_t last_bucket = 0;
  while (last_bucket < kBuckets - 1 && running + buckets[last_bucket] < top_p * total)
    running += buckets[last_bucket++];
  const int64_t count = collect(space, vocab, [&](int64_t i) { return bucket(i) == last_bucket; });
  if (count == 0) return collect(space, vocab, [](int64_t) { return true; });  // all sums fell short by rounding
  std::sort(space.order, space.order + count, likelier(scaled));
  int64_t kept = 0;
  while (kept < count && (kept == 0 || running < top_p * total)) running += space.weights[space.order[kept++]];
  const int32_t last = space.order[kept - 1];
  const double least = scaled[last];
  return collect(space, vocab, [&](int64_t i) { return scaled[i] > least || (scaled[i] == least && i <= last); });
}

// Puts the tokens that min_p, top_k and top_p keep into space.order, in id order, and returns how many they are.
int64_t keep_tokens(const DrawSpace& space, int64_t vocab, int64_t best, double min_p, int64_t top_k, double top_p) {
  const double* scaled = space.scaled;
  int32_t* order = space.order;
  const double top = scaled[best];
  if (min_p == 0 && (top_k == 0 || top_k >= vocab)) return keep_head(space, vocab, top, top_p);
  const double least = min_p > 0 ? top + std::log(min_p) : -std::numeric_limits<double>::infinity();
  int64_t count = collect(space, vocab, [&](int64_t i) { return scaled[i] >= least; });
  const int64_t limited = top_k > 0 && top_k < count ? top_k : count;
  if (limited == count && top_p == 1) return count;
  std::partial_sort(order, order + limited, order + count, likelier(scaled));
  count = limited;
  if (top_p < 1) {
    double total = 0, running = 0;
    for (int64_t i = 0; i < count; ++i) total += space.weights[order[i]];
    int64_t kept = 0;
    while (kept < count && running < top_p * total) running += space.weights[order[kept++]];
    count = kept;
  }
  std::sort(order, order + count);
  return count;
}

// space.scaled, space.weights = exp(scaled - its maximum), and the sums of the latter's chunks.
void weigh(const float* logits, int64_t vocab, double temperature, double top, const DrawSpace& space) {
  for (int64_t begin = 0; begin < vocab; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, vocab);
    for (int64_t i = begin; i < end; ++i) space.scaled[i] = logits[i] / temperature;
    for (int64_t i = begin; i < end; ++i) space.weights[i] = exp_f64(space.scaled[i] - top);
    double lanes[8] = {};
    int64_t i = begin;
    for (; i + 8 <= end; i += 8)
      for (int64_t j = 0; j < 8; ++j) lanes[j] += space.weights[i + j];
    for (; i < end; ++i) lanes[0] += space.weights[i];
    space.sums[begin / kChunk] =
        ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
}

// The token in id order at which the sum of all weights passes the uniform share of it.
int32_t walk_all(const DrawSpace& space, int64_t vocab, double uniform) {
  const int64_t chunks = (vocab - 1) / kChunk + 1;
  double total = 0, running = 0;
  for (int64_t i = 0; i < chunks; ++i) total += space.sums[i];
  int64_t chunk = 0;
  while (chunk + 1 < chunks && running + space.sums[chunk] <= uniform * total) running += space.sums[chunk++];
  int32_t likely = 0;  // rounding may leave the sum a little short: then the last token that can be drawn
  for (int64_t i = chunk * kChunk; i < vocab; ++i) {
    running += space.weights[i];
    if (space.weights[i] > 0) likely = static_cast<int32_t>(i);
    if (running > uniform * total) break;
  }
  return likely;
}

int32_t draw_token(const Draw& draw, int64_t vocab, const float* logits, int64_t best, const DrawSpace& space) {
  const double temperature = draw.temperature;
  weigh(logits, vocab, temperature, logits[best] / temperature, space);
  const double uniform = philox_uniform(draw.seed, draw.counter);
  const bool cut = draw.min_p > 0 || (draw.top_k > 0 && draw.top_k < vocab) || draw.top_p < 1;
  if (!cut) return walk_all(space, vocab, uniform);
  const int64_t count = keep_tokens(space, vocab, best, draw.min_p, draw.top_k, draw.top_p);
  double total = 0, running = 0;
  for (int64_t i = 0; i < count; ++i) total += space.weights[space.order[i]];
  for (int64_t i = 0; i < count; ++i) {
    running += space.weights[space.order[i]];
    if (running > uniform * total) return space.order[i];
  }
  return space.order[count - 1];
}

// -1 if the rules leave none.
template <typename S>
int32_t choose_token(const Draw& draw, int64_t vocab, const float* logits, const RowSummary& row,
                     const DrawSpace& space) {
  if (!row.finite) return row.best;
  int32_t best = row.best;
  const uint32_t* allowed = draw.allowed == nullptr ? nullptr : draw.allowed(draw.guided);
  const bool changes = draw.num_biases > 0 || draw.history_length > 0;
  if (allowed != nullptr && !changes) {
    const int32_t only = only_allowed(allowed, vocab);
    if (only >= 0) return std::isfinite(logits[only]) ? only : -1;
  }
  if (allowed != nullptr || changes) {
    apply_rules(draw, allowed, vocab, logits, space);
    logits = space.logits;
    const RowSummary changed = summarise<S, false>(logits, vocab);
    if (!changed.finite) return -1;
    best = changed.best;
  }
  return draw.temperature == 0 ? best : draw_token(draw, vocab, logits, best, space);
}

// Rank of the token, and the most likely tokens.
void report(const Draw& draw, int32_t id, int64_t vocab, const float* logits, const RowSummary& row,
            const DrawSpace& space) {
  int64_t ahead = 0;
  if (id >= 0) {
    const float x = logits[id];
    for (int64_t i = 0; i < id; ++i) ahead += logits[i] >= x;
    for (int64_t i = id; i < vocab; ++i) ahead += logits[i] > x;
  }
  *draw.rank = id >= 0 ? static_cast<int32_t>(ahead + 1) : 0;
  if (draw.num_top == 0) return;
  for (int64_t i = 0; i < vocab; ++i) space.order[i] = static_cast<int32_t>(i);
  if (row.finite) std::partial_sort(space.order, space.order + draw.num_top, space.order + vocab, likelier(logits));
  for (int32_t i = 0; i < draw.num_top; ++i) {
    draw.top_ids[i] = space.order[i];
    draw.top_log_probs[i] =
        static_cast<float>(static_cast<double>(logits[space.order[i]]) - logits[row.best] - row.log_sum);
  }
}

template <typename S>
void sample(const SampleArgs& args, const Team& team) {
  const DrawSpace space = draw_space(team, args.vocab);
  for (int64_t q = team.next_item(); q < args.num_draws; q = team.next_item()) {
    const Draw& draw = args.draws[q];
    const float* logits = args.logits + draw.row * args.vocab;
    const RowSummary row = draw.best_only ? summarise<S, false>(logits, args.vocab) : summarise<S>(logits, args.vocab);
    int32_t id = draw.known;
    if (id < 0) {
      const float* from = draw.processed == nullptr ? logits : draw.processed;
      const RowSummary summary = draw.processed == nullptr ? row : summarise<S>(from, args.vocab);
      id = choose_token<S>(draw, args.vocab, from, summary, space);
    }
    args.ids[q] = id;
    args.log_probs[q] = id < 0 ? -std::numeric_limits<float>::infinity()
                               : static_cast<float>(static_cast<double>(logits[id]) - logits[row.best] - row.log_sum);
    if (draw.drawn != nullptr && id >= 0 && std::isfinite(args.log_probs[q])) draw.drawn(draw.guided, id);
    if (draw.rank != nullptr) report(draw, id, args.vocab, logits, row, space);
  }
}

}  // namespace
}  // namespace ingot
