// What kernels of activation and softcap take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {

// y = activation(a) * b (op activation; b may be null), or cap * tanh(a / cap) (op softcap)
struct ElementwiseArgs {
  const float* a;
  const float* b;
  float* y;
  int64_t rows, cols;
  Activation activation;
  float cap;
};

}  // namespace ingot
