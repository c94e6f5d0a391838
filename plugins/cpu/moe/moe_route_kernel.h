// moe_route, one row per turn: bound by the exponentials of `experts` logits and one comparison for each.
#pragma once

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "isa/simd_math.h"
#include "moe/moe_route_args.h"

namespace ingot {
namespace {

// The `slots` largest logits, equal ones by lower number, into `taken` in the order of their numbers.
inline void take_largest(const float* logits, int64_t experts, int64_t slots, int64_t* taken, float* keys) {
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float key = logits[e] == logits[e] ? logits[e] : std::numeric_limits<float>::infinity();
    if (count == slots && !(key > keys[count - 1])) continue;
    int64_t at = count < slots ? count++ : slots - 1;
    for (; at > 0 && key > keys[at - 1]; --at) {
      keys[at] = keys[at - 1];
      taken[at] = taken[at - 1];
    }
    keys[at] = key;
    taken[at] = e;
  }
  for (int64_t i = 1; i < slots; ++i) {
    const int64_t e = taken[i];
    int64_t at = i;
    for (; at > 0 && taken[at - 1] > e; --at) taken[at] = taken[at - 1];
    taken[at] = e;
  }
}

// 1 / (1 + exp(-logit)) of each expert into `shares`, which with the bias are the keys.
template <typename S>
void sigmoids(const MoeRouteArgs& args, const float* logits, float* shares, float* chosen_by) {
  for (int64_t e = 0; e < args.experts; e += S::kWidth) {
    const int64_t n = args.experts - e;
    store_lanes<S>(shares + e, exp<S>(S::sub(S::zero(), load_lanes<S>(logits + e, n))), n);
  }
  for (int64_t e = 0; e < args.experts; ++e) {
    shares[e] = logits[e] == logits[e] ? 1 / (1 + shares[e]) : logits[e];
    chosen_by[e] = args.bias ? shares[e] + args.bias[e] : shares[e];
  }
}

// exp(logit - the largest) of each expert into `shares`; returns their sum.
template <typename S>
float softmax_shares(const float* logits, int64_t experts, int64_t slots, const int64_t* taken, float* shares) {
  using V = typename S::V;
  float largest = logits[taken[0]];
  for (int64_t i = 1; i < slots; ++i) largest = logits[taken[i]] > largest ? logits[taken[i]] : largest;
  return row_sum<S>(experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const V share = exp<S>(S::sub(load_lanes<S>(logits + i, n), S::set1(largest)));
    store_lanes<S>(shares + i, share, n);
    return S::select(S::first_lanes(n < S::kWidth ? n : S::kWidth), share, S::zero());
  });
}

template <typename S>
void moe_route(const MoeRouteArgs& args, const Team& team) {
  const int64_t experts = args.experts, slots = args.slots;
  auto* const taken = reinterpret_cast<int64_t*>(team.scratch(static_cast<size_t>(experts * 8 + slots * 16)));
  auto* const keys = reinterpret_cast<float*>(taken + slots);
  float* const shares = keys + slots;
  float* const chosen_by = shares + experts;
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* logits = args.logits + row * experts;
    if (args.sigmoid) sigmoids<S>(args, logits, shares, chosen_by);
    take_largest(args.sigmoid ? chosen_by : logits, experts, slots, taken, keys);
    float total = args.sigmoid ? 1.0f : softmax_shares<S>(logits, experts, slots, taken, shares);
    if (args.normalized) {
      total = args.eps;
      for (int64_t i = 0; i < slots; ++i) total += shares[taken[i]];
    }
    for (int64_t i = 0; i < slots; ++i) {
      args.ids[row * slots + i] = static_cast<float>(taken[i]);
      args.weights[row * slots + i] = shares[taken[i]] / total * args.scale;
    }
  }
}

}  // namespace
}  // namespace ingot
