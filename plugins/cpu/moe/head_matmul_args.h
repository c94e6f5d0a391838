// What kernels of head_matmul take.
#pragma once

#include "matmul/activations.h"
#include "moe/moe_matmul_args.h"

namespace ingot {

// Products of each head with a weight of its own, see plugins/ops/head_matmul.py: heads are the experts, and each takes
// all rows. x [rows, heads, k + kept], y [rows, heads, n + kept].
struct HeadMatmulArgs {
  const float* x;
  float* y;
  const WeightSlice* pieces;
  int64_t num_panels;  // of one head
  int64_t rows, heads, n, k, kept;

  MoeMatmulArgs product() const {
    return {.x = x,
            .ids = nullptr,
            .weights = nullptr,
            .pieces = pieces,
            .num_panels = num_panels,
            .y = y,
            .rows = rows,
            .slots = 1,
            .experts = heads,
            .n = n,
            .k = k,
            .group = 0,
            .activation = Activation::kNone};
  }
};

}  // namespace ingot
