// What kernels of gather_columns take.
#pragma once

#include <cstdint>

namespace ingot {

// y[r, i] = x[r, order[i]], see plugins/ops/gather_columns.py.
struct GatherColumnsArgs {
  const float* x;      // [rows, cols]
  const float* order;  // [count], whole numbers
  float* y;            // [rows, count]
  int64_t rows, cols, count;
};

}  // namespace ingot
