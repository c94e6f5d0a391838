// What kernels of take_columns take.
#pragma once

#include <cstdint>

namespace ingot {

// y[r, g, :] = x[r, g, first : first + count], see plugins/ops/take_columns.py.
struct TakeColumnsArgs {
  const float* x;  // [rows, groups, of]
  float* y;        // [rows, groups, count]
  int64_t rows, groups;
  int64_t of, first, count;
};

}  // namespace ingot
