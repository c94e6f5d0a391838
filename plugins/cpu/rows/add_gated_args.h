// What kernels of add_gated take.
#pragma once

#include <cstdint>

namespace ingot {

// y = a + b * sigmoid(gate), see plugins/ops/add_gated.py.
struct AddGatedArgs {
  const float* a;     // [rows, cols]
  const float* b;     // [rows, cols]
  const float* gate;  // [rows]
  float* y;           // [rows, cols]; may be a
  int64_t rows, cols;
};

}  // namespace ingot
