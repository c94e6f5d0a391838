// Ops activation, add, softcap and scale over all elements, 4 bytes in (8 with a second operand) and 4 out per element.
#pragma once

#include "ingot/kernel.h"
#include "isa/simd_lanes.h"
#include "matmul/activations.h"
#include "rows/elements_args.h"
#include "rows/elementwise_args.h"

namespace ingot {
namespace {

// Calls each(i, lanes) for the thread's share of all elements, in whole cache lines.
template <typename S, typename Args, typename Each>
[[gnu::always_inline]] inline void for_share(const Args& args, const Team& team, Each each) {
  const int64_t total = args.rows * args.cols;
  const Team::Range lines = team.share((total + 15) / 16);
  const int64_t end = lines.end * 16 < total ? lines.end * 16 : total;
  for (int64_t i = lines.begin * 16; i < end; i += S::kWidth) each(i, end - i);
}

template <typename S>
void activation(const ElementwiseArgs& args, const Team& team) {
  for_share<S>(args, team, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    typename S::V y = activate<S>(args.activation, load_lanes<S>(args.a + i, n));
    if (args.b) y = S::mul(y, load_lanes<S>(args.b + i, n));
    store_lanes<S>(args.y + i, y, n);
  });
}

template <typename S>
void softcap(const ElementwiseArgs& args, const Team& team) {
  for_share<S>(args, team, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_lanes<S>(args.y + i, bend<S>(load_lanes<S>(args.a + i, n), args.cap), n);
  });
}

template <typename S>
void scale(const ElementsArgs<1>& args, const Team& team) {
  const typename S::V factor = S::set1(args.numbers[0]);
  for_share<S>(args, team, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_lanes<S>(args.y + i, S::mul(load_lanes<S>(args.inputs[0] + i, n), factor), n);
  });
}

template <typename S>
void add(const ElementsArgs<2>& args, const Team& team) {
  const float *a = args.inputs[0], *b = args.inputs[1];
  for_share<S>(args, team, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_lanes<S>(args.y + i, S::add(load_lanes<S>(a + i, n), load_lanes<S>(b + i, n)), n);
  });
}

}  // namespace
}  // namespace ingot
