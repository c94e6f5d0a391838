// moe_route, one row per turn: bound by the exponentials of `experts` logits and one comparison for each.
#pragma once

#include <algorithm>
#include <limits>

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

// The share of each expert: sigmoid of its logit, or of the softmax over all.
template <typename S>
void all_shares(const MoeRouteArgs& args, const float* logits, float* shares) {
  using V = typename S::V;
  V divisor = S::zero();
  if (!args.sigmoid) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t e = 0; e < args.experts; ++e) largest = logits[e] > largest ? logits[e] : largest;
    divisor = S::set1(row_sum<S>(args.experts, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      const V share = exp<S>(S::sub(load_lanes<S>(logits + i, n), S::set1(largest)));
      store_lanes<S>(shares + i, share, n);
      return S::select(S::first_lanes(n < S::kWidth ? n : S::kWidth), share, S::zero());
    }));
  }
  const V one = S::set1(1.0f);
  for (int64_t e = 0; e < args.experts; e += S::kWidth) {
    const int64_t n = args.experts - e;
    const V share = args.sigmoid ? S::div(one, S::add(one, exp<S>(S::sub(S::zero(), load_lanes<S>(logits + e, n)))))
                                 : S::div(load_lanes<S>(shares + e, n), divisor);
    store_lanes<S>(shares + e, share, n);
  }
}

// What `per_token` experts of a row are taken by, where that is not the logits; memory for it is in `best`.
inline void fill_keys(const MoeRouteArgs& args, const float* shares, float* keys, float* best, int64_t* taken) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < args.experts; ++e) {
    const float key = args.bias ? shares[e] + args.bias[e] : shares[e];
    keys[e] = key == key ? key : infinity;
  }
  if (args.groups == 1) return;
  const int64_t size = args.experts / args.groups;
  float *const sums = best, *const largest = best + args.groups;
  for (int64_t g = 0; g < args.groups; ++g) {
    float first = -infinity, second = -infinity;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (keys[e] > first) {
        second = first;
        first = keys[e];
      } else if (keys[e] > second) {
        second = keys[e];
      }
    }
    sums[g] = args.group_best == 1 ? first : first + second;
  }
  take_largest(sums, args.groups, args.group_top, taken, largest);
  for (int64_t g = 0, next = 0; g < args.groups; ++g) {
    if (next < args.group_top && taken[next] == g) {
      ++next;
    } else {
      std::fill_n(keys + g * size, size, -infinity);
    }
  }
}

template <typename S>
void moe_route(const MoeRouteArgs& args, const Team& team) {
  const int64_t experts = args.experts, slots = args.slots;
  const int64_t most = std::max(slots, args.group_top);
  auto* const taken = reinterpret_cast<int64_t*>(
      team.scratch(static_cast<size_t>(most) * 8 + static_cast<size_t>(most + args.groups + 2 * experts) * 4));
  auto* const best = reinterpret_cast<float*>(taken + most);
  float* const shares = best + most + args.groups;
  float* const keys = shares + experts;
  const bool by_logits = !args.sigmoid && !args.bias && args.groups == 1;
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const float* logits = args.logits + row * experts;
    all_shares<S>(args, logits, shares);
    if (!by_logits) fill_keys(args, shares, keys, best, taken);
    take_largest(by_logits ? logits : keys, experts, slots, taken, best);
    float total = 1.0f;
    if (args.normalized) {
      total = 0;
      for (int64_t i = 0; i < slots; ++i) total += shares[taken[i]];
      total = (total < args.floor ? args.floor : total) + args.eps;
    }
    for (int64_t i = 0; i < slots; ++i) {
      args.ids[row * slots + i] = static_cast<float>(taken[i]);
      args.weights[row * slots + i] = shares[taken[i]] / total * args.scale;
    }
  }
}

}  // namespace
}  // namespace ingot
