// What kernels of paged_attention take.
#pragma once

#include <cstdint>

#include "attention/paged_kv.h"
#include "attention/rope_kv_write_args.h"

namespace ingot {

struct PagedAttentionArgs {
  const float* q;  // [tokens, heads * head_dim]
  float* y;        // [tokens, heads * head_dim]
  PagedKv kv;
  const float* sinks;   // [heads]; may be null
  const float* slopes;  // [heads]: of ALiBi; may be null
  bool bf16_bias;       // see the op
  float growth;         // likewise
  int64_t growth_every;
  int64_t heads, window;              // window: tokens that a token sees, itself included
  float scale, softcap;               // softcap: 0 without
  const RopeQueries* rope = nullptr;  // makes q; null where q is there
};

}  // namespace ingot
