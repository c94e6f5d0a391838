// What kernels of add_to_streams take.
#pragma once

#include <cstdint>

namespace ingot {

// See plugins/ops/add_to_streams.py.
struct AddToStreamsArgs {
  const float* x;      // [rows, streams, width]
  const float* made;   // [rows, width]
  const float* coefs;  // [rows, streams], may be null
  float* y;            // [rows, streams, width]
  int64_t rows, streams, width, active;
};

}  // namespace ingot
