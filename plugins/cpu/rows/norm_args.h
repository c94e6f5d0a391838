// What kernels of rms_norm and layer_norm take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {

// sum = x + residual; y = norm(sum) * weight (+ bias). sum may be null, or alias residual or x. Where y is the calling
// thread's `own`, it computes all rows, else its share of them.
struct NormArgs {
  const float* x;
  const float* weight;    // [hidden]
  const float* bias;      // [hidden] or null
  const float* residual;  // [rows, hidden] or null
  float* y;
  float* sum;  // [rows, hidden] or null
  int64_t rows, hidden;
  float eps;
  bool own = false;
};

// A norm that a product computes itself, each row when it prepares it.
struct RowNorm {
  void (*run)(const void* args, const Team& team);
  NormArgs args;  // without residual and sum

  // Row `row` of the norm → to.
  void row(int64_t row, float* to, const Team& team) const {
    NormArgs one = args;
    one.x += row * args.hidden;
    one.y = to;
    one.rows = 1;
    one.own = true;
    run(&one, team);
  }
};

}  // namespace ingot
