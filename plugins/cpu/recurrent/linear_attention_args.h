// What kernels of linear_attention take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"
#include "recurrent/state_slots.h"

namespace ingot {

// See plugins/ops/linear_attention.py. The state is [heads, key_dim, value_dim].
struct LinearAttentionArgs {
  const float* x;      // [tokens, q | k | v], or v | k | q
  const float* dt;     // [tokens, heads], by_dim [tokens, heads * key_dim]
  const float* beta;   // [tokens, heads] or null: values times the step are added, without what the state says of them
  const float* a_log;  // [heads]
  const float* skip;   // [heads] or null
  float* y;            // [tokens, heads * value_dim]
  StateSlots kv;
  int64_t heads, key_heads, key_dim, value_dim;
  float scale, l2_eps, dt_min, dt_max;
  bool values_first, by_dim;
};

}  // namespace ingot
