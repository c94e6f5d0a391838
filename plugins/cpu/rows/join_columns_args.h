// What kernels of join_columns take.
#pragma once

#include <cstdint>

namespace ingot {

// Rows side by side, see plugins/ops/join_columns.py.
struct JoinColumnsArgs {
  static constexpr int kMost = 3;
  const float* parts[kMost];  // [rows, cols[i]]; those that are not there have no columns
  int64_t cols[kMost];
  float* y;  // [rows, all of them]
  int64_t rows;
};

}  // namespace ingot
