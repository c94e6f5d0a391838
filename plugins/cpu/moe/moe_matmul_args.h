// What kernels of moe_gate_up and moe_down take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {

// How many ways of going about its work each has, as kMatmulTactics.
constexpr int32_t kGateUpTactics = 3, kDownTactics = 2;

// Products with the weights of experts, see plugins/ops/moe_gate_up.py and moe_down.py.
struct MoeMatmulArgs {
  const float* x;               // moe_gate_up: [rows, k]; moe_down: [rows, slots, k]
  const float* ids;             // [rows, slots], whole numbers
  const float* weights;         // moe_down: [rows, slots]
  const float* bias = nullptr;  // [experts, n], of each expert's products; may be null
  const WeightSlice* pieces;    // each holds its panels of every expert, one expert after the other
  int64_t num_panels;           // of one expert; gated: gate and up panels alternate
  float* y;                     // moe_gate_up: [rows, slots, n / 2], n where not gated; moe_down: [rows, n]
  int64_t rows, slots, experts;
  int64_t n, k;                // of one expert's weight
  int64_t group;               // as in MatmulArgs
  Activation activation;       // moe_gate_up
  bool gated = true;           // moe_gate_up: whether n counts gate and up rows
  float limit = 0, alpha = 0;  // moe_gate_up: of the clamped gate, 0 without
  int32_t tactic = 0;  // how the work is shared, of no consequence for y: 0 as shipped, else see moe_matmul_parts.h
};

}  // namespace ingot
