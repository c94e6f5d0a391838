// What follows a tile of 128 rows of the weight and kTokens rows of x, whose sums lie in shared memory: the epilogue,
// or the sums of a part of K, which product_sum adds up.
#pragma once

#if (defined(INGOT_WIDE) || defined(INGOT_FP8)) && !defined(INGOT_WEIGHT_IS_F32)

constexpr int kWideRows = 128, kWidePairs = 4, kWidePanels = 8;  // of the weight, in a block
constexpr int kWideSums = kWideRows + 4;  // floats from a row of x to the next: lanes meet each bank once

// All sums of a block → y, or → the sums of a part.
template <int kTokens, int kThreads>
INGOT_DEVICE void finish_tile(const Product& p, const float* sums, float* parts) {
  const bool gated = p.of.half != 0;
  const int top = p.first(kTokens);
  const int block_cols = gated ? kWideRows / 2 : kWideRows, cols = gated ? p.of.half : p.of.n;
  for (int at = threadIdx.x; at < kTokens * block_cols / 4; at += kThreads) {
    const int token = at / (block_cols / 4), column = at % (block_cols / 4) * 4;
    const int row = top + token, col = blockIdx.y * block_cols + column;
    if (row >= p.rows || col >= cols) continue;
    const float* x = sums + token * kWideSums + column;
    const float* up = x + kWideRows / 2;  // of a gated product
    if (parts) {
      float* to = parts + (static_cast<int64_t>(blockIdx.z) * p.rows + row) * p.of.n + col;
      for (int j = 0; j < 4 && col + j < cols; ++j) {
        to[j] = x[j];
        if (gated) to[p.of.half + j] = up[j];
      }
    } else if (cols % 4 == 0) {
      FourTerms of;
      p.to.load_biases(of, col);
      of.x = load_four(x);
      if (gated) of.up = load_four(up);
      p.to.load_residual(of, p.target(row), col);
      p.to.write_four(p.target(row), col, of, gated);
    } else {
      const int to = p.target(row);
      for (int j = 0; j < 4 && col + j < cols; ++j) {
        gated ? p.to.write_gated(to, col + j, x[j], up[j]) : p.to.write(to, col + j, x[j]);
      }
    }
  }
}

// Adds `parts` sums of each row, [parts][rows][n], and finishes it. Grid: (rows, strips of kSumStrip columns)
constexpr int kSumThreads = 256, kSumStrip = 4 * kSumThreads;

INGOT_KERNEL(kSumThreads)
product_sum(void* y, const float* sums, const float* bias, const float* residual, const int* rows, int n, int gated,
            int kind, int narrow, int parts) {
  wait_for_previous();
  const int cols = gated ? n / 2 : n, col = blockIdx.y * kSumStrip + 4 * threadIdx.x;
  if (col >= cols) return;
  const Epilogue to{y, bias, gated && bias ? bias + cols : nullptr, residual, cols, kind, narrow, 0.f, 0.f};
  const int64_t row = blockIdx.x, stride = static_cast<int64_t>(*rows) * n;
  const float* from = sums + row * n + col;
  if (cols % 4 == 0) {
    FourTerms of;
    to.load_biases(of, col);
    to.load_values(of, row, col, from, gated ? from + cols : nullptr);
    for (int part = 1; part < parts; ++part) {
      of.x = add_four(of.x, load_four(from + part * stride));
      if (gated) of.up = add_four(of.up, load_four(from + part * stride + cols));
    }
    to.write_four(row, col, of, gated);
    return;
  }
  for (int i = 0; i < 4 && col + i < cols; ++i) {
    float x = from[i], up = gated ? from[cols + i] : 0.f;
    for (int part = 1; part < parts; ++part) {
      x = __fadd_rn(x, from[part * stride + i]);
      if (gated) up = __fadd_rn(up, from[part * stride + cols + i]);
    }
    gated ? to.write_gated(row, col + i, x, up) : to.write(row, col + i, x);
  }
}

#endif
