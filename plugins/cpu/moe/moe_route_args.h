// What kernels of moe_route take.
#pragma once

#include <cstdint>

namespace ingot {

// The experts that each row takes, see plugins/ops/moe_route.py.
struct MoeRouteArgs {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts], may be null
  float* ids;           // [rows, slots], whole numbers
  float* weights;       // [rows, slots]
  int64_t rows, experts, slots;
  bool normalized, sigmoid;
  float eps, floor, scale;
  int64_t groups, group_top, group_best;
};

}  // namespace ingot
