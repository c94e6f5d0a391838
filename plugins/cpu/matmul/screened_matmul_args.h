// What kernels of screened_matmul take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul/matmul_args.h"

namespace ingot {

// A kernel of matmul, with what it takes but for x and the rows.
struct ProductCall {
  KernelFn run;
  ScratchFn scratch;  // or null
  MatmulArgs args;
};

// Rows of logits, or of the best of them alone, see plugins/ops/screened_matmul.py.
struct ScreenedMatmulArgs {
  const float* x;                 // [rows, k]
  const int32_t* whole_rows;      // [rows]
  ProductCall product, estimate;  // of w8 codes and of 4-bit codes, both to y
  const float* scales;            // [n]
  const float* dither;            // [k]
  const std::byte* table;         // rows of w8, row_bytes each
  float* y;                       // [rows, n]
  int64_t rows, n, k, row_bytes;
  int32_t tactic = 0;  // of `product`
};

// MOST_ROWS of the op: the more rows there are, the less the bytes of the weight count beside its arithmetic, which a
// screen does not lessen.
constexpr int64_t kScreenRows = 4;
constexpr int64_t kScreenThreads = 256;  // a team's most

}  // namespace ingot
