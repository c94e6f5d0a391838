// add_gated, one row per turn: 8 bytes in and 4 out per element.
#pragma once

#include "ingot/kernel.h"
#include "isa/simd_lanes.h"
#include "isa/simd_math.h"
#include "rows/add_gated_args.h"

namespace ingot {
namespace {

template <typename S>
void add_gated(const AddGatedArgs& args, const Team& team) {
  using V = typename S::V;
  const V one = S::set1(1.0f);
  const Team::Range mine = team.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    const V factor = S::div(one, S::add(one, exp<S>(S::set1(-args.gate[row]))));
    const float *a = args.a + row * args.cols, *b = args.b + row * args.cols;
    float* y = args.y + row * args.cols;
    for (int64_t i = 0; i < args.cols; i += S::kWidth) {
      const int64_t n = args.cols - i;
      store_lanes<S>(y + i, S::fma(load_lanes<S>(b + i, n), factor, load_lanes<S>(a + i, n)), n);
    }
  }
}

}  // namespace
}  // namespace ingot
