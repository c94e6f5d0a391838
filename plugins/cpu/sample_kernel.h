// One token per draw: the algorithm of plugins/ops/sample.py. Draws are shared among threads. A greedy draw reads its
// row twice; a random one weighs every token in float64 and sorts only what top-k or top-p may keep.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "ingot/kernel.h"
#include "simd_lanes.h"
#include "simd_math.h"

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
  double p = 1.0 / 6227020800.0;  // Taylor to r^13, |r| <= ln 2 / 2
  constexpr double kInverse[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                 1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0, 1.0};
  for (int i = 0; i < 13; ++i) p = std::fma(p, r, kInverse[i]);
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(shifted) << 52));
  return x > -708.0 ? power : 0.0;
}

struct RowSummary {
  int32_t best;     // lowest index of the maximum; of the first NaN where there is one (as in argmax)
  double log_sum;   // log(sum(exp(logits - max)))
  bool finite;      // no NaN and a finite maximum: the row is a distribution
};

template <typename S>
RowSummary summarise(const float* logits, int64_t vocab) {
  using V = typename S::V;
  constexpr int64_t kChunk = 1024;  // float32 sums stay short
  V tops = S::set1(-std::numeric_limits<float>::infinity());
  const V lowest = tops;
  const auto lanes = [vocab](int64_t i) { return S::first_lanes(vocab - i < S::kWidth ? vocab - i : S::kWidth); };
  for (int64_t i = 0; i < vocab; i += S::kWidth)
    tops = S::max(tops, S::select(lanes(i), load_lanes<S>(logits + i, vocab - i), lowest));
  const float top = S::reduce_max(tops);
  double sum = 0;
  for (int64_t chunk = 0; chunk < vocab; chunk += kChunk) {
    V sums = S::zero();
    for (int64_t i = chunk; i < chunk + kChunk && i < vocab; i += S::kWidth) {
      const V weight = exp<S>(S::sub(load_lanes<S>(logits + i, vocab - i), S::set1(top)));
      sums = S::add(sums, S::select(lanes(i), weight, S::zero()));
    }
    sum += static_cast<double>(S::reduce_add(sums));
  }
  const bool finite = std::isfinite(sum) && std::isfinite(top);
  int64_t best = 0;
  if (finite) {
    while (logits[best] != top) ++best;
  } else {
    for (int64_t i = 0; i < vocab && !std::isnan(logits[best]); ++i)
      if (std::isnan(logits[i]) || logits[i] > logits[best]) best = i;
  }
  return {static_cast<int32_t>(best), std::log(sum), finite};
}

// Scratch of one draw, each [vocab].
struct DrawSpace {
  double* scaled;
  double* weights;
  int32_t* order;
};

// Puts the tokens that top_k and top_p keep into space.order, in id order, and returns how many they are.
int64_t keep_tokens(const DrawSpace& space, int64_t vocab, int64_t best, int64_t top_k, double top_p) {
  const double* scaled = space.scaled;
  int32_t* order = space.order;
  const auto likelier = [scaled](int32_t a, int32_t b) { return scaled[a] > scaled[b] || (scaled[a] == scaled[b] && a < b); };
  const auto by_id = [](int32_t a, int32_t b) { return a < b; };
  const double top = scaled[best];
  const bool limited = top_k > 0 && top_k < vocab;
  int64_t count = 0;
  double total = 0;
  if (limited) {
    for (int64_t i = 0; i < vocab; ++i) order[i] = static_cast<int32_t>(i);
    std::partial_sort(order, order + top_k, order + vocab, likelier);
    count = top_k;
    for (int64_t i = 0; i < count; ++i) total += space.weights[order[i]];
  } else {
    for (int64_t i = 0; i < vocab; ++i) total += space.weights[i];
  }
  if (top_p < 1) {
    // Without top-k only a head of the sorted order is made, the tokens within `reach` of the best, longer if need be.
    for (double reach = 4;; reach *= 2) {
      if (!limited) {
        count = 0;
        for (int64_t i = 0; i < vocab; ++i)
          if (scaled[i] >= top - reach) order[count++] = static_cast<int32_t>(i);
        std::sort(order, order + count, likelier);
      }
      double running = 0;
      int64_t kept = 0;
      while (kept < count && running < top_p * total) running += space.weights[order[kept++]];
      if (running >= top_p * total || count == vocab || limited) {
        count = kept;
        break;
      }
    }
  }
  std::sort(order, order + count, by_id);
  return count;
}

int32_t draw_token(const SampleArgs& args, int64_t q, const float* logits, int64_t best, const DrawSpace& space) {
  const double temperature = args.temperature[q];
  for (int64_t i = 0; i < args.vocab; ++i) space.scaled[i] = logits[i] / temperature;
  const double top = space.scaled[best];
  for (int64_t i = 0; i < args.vocab; ++i) space.weights[i] = exp_f64(space.scaled[i] - top);
  const double uniform = philox_uniform(args.seed[q], args.counter[q]);
  const bool cut = (args.top_k[q] > 0 && args.top_k[q] < args.vocab) || args.top_p[q] < 1;
  const int64_t count = cut ? keep_tokens(space, args.vocab, best, args.top_k[q], args.top_p[q]) : args.vocab;
  const auto id = [&](int64_t i) { return cut ? space.order[i] : static_cast<int32_t>(i); };
  double total = 0, running = 0;
  for (int64_t i = 0; i < count; ++i) total += space.weights[id(i)];
  for (int64_t i = 0; i < count; ++i) {
    running += space.weights[id(i)];
    if (running > uniform * total) return id(i);
  }
  return id(count - 1);
}

template <typename S>
void sample(const SampleArgs& args, const Team& team) {
  const auto vocab = static_cast<size_t>(args.vocab);
  auto* memory = reinterpret_cast<double*>(team.scratch(vocab * (2 * sizeof(double) + sizeof(int32_t))));
  const DrawSpace space{memory, memory + vocab, reinterpret_cast<int32_t*>(memory + 2 * vocab)};
  for (int64_t q = team.take(); q < args.draws; q = team.take()) {
    const float* logits = args.logits + args.row[q] * args.vocab;
    const RowSummary row = summarise<S>(logits, args.vocab);
    const bool greedy = args.temperature[q] == 0 || !row.finite;
    args.ids[q] = greedy ? row.best : draw_token(args, q, logits, row.best, space);
    args.log_probs[q] = static_cast<float>(static_cast<double>(logits[args.ids[q]]) - logits[row.best] - row.log_sum);
  }
}

}  // namespace
}  // namespace ingot
