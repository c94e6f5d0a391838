// What kernels of gather_rows take.
#pragma once

#include <cstdint>

namespace ingot {

struct GatherRowsArgs {
  const float* x;        // [tokens, cols]
  const int32_t* taken;  // [rows], of x
  float* y;              // [rows, cols]
  int64_t rows, cols;
};

}  // namespace ingot
