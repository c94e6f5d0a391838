// What kernels of rope_table take.
#pragma once

#include <cstdint>

namespace ingot {

struct RopeTableArgs {
  const float* inv_freq;     // [half]
  const int32_t* positions;  // [tokens]
  float* y;                  // [tokens, 2 * half]: cosines, then sines
  int64_t rows, half;        // rows: tokens
  float scale;
};

}  // namespace ingot
