// What kernels of mix_streams take.
#pragma once

#include <cstdint>

namespace ingot {

// y[r, i] = x[r, i] + sum over j of coefs[r, i, j] * x[r, j], see plugins/ops/mix_streams.py.
struct MixStreamsArgs {
  const float* x;      // [rows, streams, width]
  const float* coefs;  // [rows, streams, streams]
  float* y;            // [rows, streams, width]
  int64_t rows, streams, width;
};

}  // namespace ingot
