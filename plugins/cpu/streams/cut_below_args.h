// What kernels of cut_below take.
#pragma once

#include <cstdint>

namespace ingot {

// y = max(0, x - mean - deviations * std) of each row.
struct CutBelowArgs {
  const float* x;
  float* y;  // may be x
  int64_t rows, cols;
  float deviations;
};

}  // namespace ingot
