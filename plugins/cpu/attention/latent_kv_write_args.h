// What kernels of latent_kv_write take.
#pragma once

#include <cstdint>

#include "attention/paged_kv.h"

namespace ingot {

struct LatentKvWriteArgs {
  const float* q;        // [tokens, heads * q_dim]
  const float* latent;   // [tokens, head_dim]
  const float* cos_sin;  // [tokens, 2 * half]; null without rotation
  const float* norm;     // [value_dim]
  float* y;              // as q; may be q
  PagedKv kv;
  int64_t heads, q_dim, half;
  bool interleaved;
  float norm_eps;
  float growth;  // queries are multiplied by 1 + growth * log(1 + floor(position / growth_every))
  int64_t growth_every;
};

}  // namespace ingot
