// What kernels of rope_query take.
#pragma once

#include <cstdint>

namespace ingot {

struct RopeQueryArgs {
  const float* x;        // [tokens, heads * head_dim]
  const float* cos_sin;  // [tokens, 2 * half] or null
  float* y;              // [tokens, heads * head_dim]
  const float* q_norm;   // [q_run] or null: an RMS norm over each run of so many dims before the rotation
  int64_t rows;          // tokens
  int64_t heads, head_dim, half, q_run;
  float norm_eps;
  bool interleaved;
};

}  // namespace ingot
