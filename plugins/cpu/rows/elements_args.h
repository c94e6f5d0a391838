// For ops that make each element of their output of the same element of every input, and of attributes that are
// numbers. Such an op needs no binding of its own: its kernels take this struct, and `for_share` of
// elementwise_kernel.h shares the work.
#pragma once

#include <cstdint>

namespace ingot {

constexpr int kMostElements = 3;  // inputs of such an op
constexpr int kMostNumbers = 4;   // attributes of such an op

template <int kInputs>
struct ElementsArgs {
  static_assert(kInputs >= 1 && kInputs <= kMostElements);
  const float* inputs[kInputs];  // [rows, cols] each; y may be one of them
  float* y;                      // [rows, cols]
  int64_t rows, cols;
  float numbers[kMostNumbers];  // the attributes that INGOT_KERNEL names, in its order
};

}  // namespace ingot
