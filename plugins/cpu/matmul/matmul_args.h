// What kernels of matmul take.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"
#include "rows/norm_args.h"

namespace ingot {

// How many ways of going about its work a product has, on tiles (AMX) more than elsewhere. Sessions and timing refuse
// numbers beyond them.
constexpr int32_t kMatmulTactics = 2, kTileTactics = 5;

// y[r, :] = epilogue(x[r, :] . W^T), see plugins/ops/matmul.py. Panel layouts: plugins/layouts.py.
struct MatmulArgs {
  const float* x;             // [rows, k]
  const WeightSlice* pieces;  // packed weight, num_panels panels of 16 columns
  int64_t num_pieces;
  int64_t num_panels;     // gated: gate and up panels alternate
  const float* bias;      // [n] or null, in the weight's logical order (gated: gate part, then up part)
  const float* residual;  // [rows, out] or null; may alias y
  float* y;               // [rows, out]
  int64_t rows, n, k;     // n: logical weight rows; out = gated ? n / 2 : n
  Activation activation;
  bool gated;
  int64_t group;       // columns that share a multiplier or a scale; 0 for weights without groups
  int32_t tactic = 0;  // how the work is cut, of no consequence for y: 0 as shipped, 1 otherwise (matmul_parts.h)
  const RowNorm* norm = nullptr;  // makes x; null where x is there. Only for kernels with scratch, which prepare rows
};

}  // namespace ingot
