// What kernels of activation, softcap and scale take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {

// y = activation(a) * b (op activation; b may be null) cap * tanh(a / cap) (op softcap), or
// factor * a (op scale)
struct ElementwiseArgs {
  const float* a;
  const float* b;
  float* y;
  int64_t rows, cols;
  Activation activation;
  float cap;  // or factor
};

}  // namespace ingot
