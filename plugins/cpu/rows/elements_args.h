// For ops that make each element of their output of the same element of every input, with numbers as attributes. Such
// an op needs no binding of its own: its kernels take this struct, and `for_share` of elementwise_kernel.h shares the
// work.
#pragma once

#include <cstdint>

namespace ingot {

struct ElementsArgs {
  static constexpr int kMostInputs = 3, kMostNumbers = 4;
  const float* inputs[kMostInputs];  // [rows, cols] each; y may be one of them
  float* y;                          // [rows, cols]
  int64_t rows, cols;
  float numbers[kMostNumbers];  // the attributes, by the order of their names
};

}  // namespace ingot
