// What kernels of causal_conv take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"
#include "recurrent/state_slots.h"

namespace ingot {

// y[t] = activation(bias + sum over j of weight[j] * x[t - width + 1 + j]); the state is [width - 1, channels].
struct CausalConvArgs {
  const float* x;       // [tokens, channels]
  const float* weight;  // [width, channels]
  const float* bias;    // [channels] or null
  float* y;             // [tokens, channels]
  StateSlots kv;
  int64_t channels, width;
  bool silu;
};

}  // namespace ingot
