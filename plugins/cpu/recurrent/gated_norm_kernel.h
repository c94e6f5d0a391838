// gated_norm, row by row and group by group; and sigmoid_gate over all elements.
#pragma once

#include <cmath>

#include "ingot/kernel.h"
#include "isa/reduce.h"
#include "matmul/activations.h"
#include "recurrent/gated_norm_args.h"
#include "rows/elements_args.h"
#include "rows/elementwise_kernel.h"

namespace ingot {
namespace {

template <typename S>
void gated_norm(const GatedNormArgs& args, const Team& team) {
  using V = typename S::V;
  const Team::Range mine = team.share(args.rows);
  const auto gated = [&](V v, const float* gate, int64_t n) __attribute__((always_inline)) {
    const V z = load_lanes<S>(gate, n);
    return S::mul(v, over_logistic<S>(args.sigmoid ? S::set1(1.0f) : z, z));
  };
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    for (int64_t first = 0; first < args.cols; first += args.group) {
      const int64_t at = row * args.cols + first;
      const float* weight = args.weight + (args.weights == args.cols ? first : 0);
      const auto given = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const V v = load_lanes<S>(args.x + at + i, n);
        return args.norm_first ? v : gated(v, args.gate + at + i, n);
      };
      const float squares = row_sum<S>(args.group, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const V v = given(i, n);
        return S::mul(v, v);
      });
      const V factor = S::set1(1.0f / std::sqrt(squares / static_cast<float>(args.group) + args.eps));
      for (int64_t i = 0; i < args.group; i += S::kWidth) {
        const int64_t n = args.group - i;
        const V scaled = S::mul(S::mul(given(i, n), factor), load_lanes<S>(weight + i, n));
        store_lanes<S>(args.y + at + i, args.norm_first ? gated(scaled, args.gate + at + i, n) : scaled, n);
      }
    }
  }
}

template <typename S>
void sigmoid_gate(const ElementsArgs<2>& args, const Team& team) {
  for_share<S>(args, team, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const typename S::V open = over_logistic<S>(S::set1(1.0f), load_lanes<S>(args.inputs[1] + i, n));
    store_lanes<S>(args.y + i, S::mul(load_lanes<S>(args.inputs[0] + i, n), open), n);
  });
}

}  // namespace
}  // namespace ingot
