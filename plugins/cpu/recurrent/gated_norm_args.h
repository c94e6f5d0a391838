// What kernels of gated_norm take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {

// norm_first: y = norm(x) * weight * act(gate), else y = norm(x * act(gate)) * weight; norm over groups of columns.
struct GatedNormArgs {
  const float* x;
  const float* gate;
  const float* weight;  // [weights]
  float* y;             // may be x or gate
  int64_t rows, cols, group, weights;
  float eps;
  bool norm_first, sigmoid;
};

}  // namespace ingot
