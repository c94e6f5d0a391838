// Products of each head with a weight of its own, by the products of experts (moe_matmul_parts.h): every head takes all
// rows, and its sums are stored side by side.
//
// Floors: the weights of all heads over the bandwidth of memory; 2 * heads * N * K operations for each row.
#pragma once

#include <algorithm>

#include "isa/simd_lanes.h"
#include "moe/head_matmul_args.h"
#include "moe/moe_matmul_parts.h"

namespace ingot {
namespace {

// Items are a head and some of its panels, of which there are enough for all threads: few rows are bound by reading
// them, and many rows are rounded and gathered once for each item.
template <typename S, typename Product>
void head_matmul(const HeadMatmulArgs& args, const Team& team) {
  const MoeMatmulArgs each = args.product();
  Product product(each, team.scratch(Product::scratch(each)));
  const int64_t in = args.k + args.kept, out = args.n + args.kept;
  int64_t width = std::min<int64_t>(Product::kMaxPanels, args.num_panels);
  while (args.heads * ceil_div(args.num_panels, width) < 4 * team.count && width > 4) width = ceil_div(width, 2);
  const int64_t parts = ceil_div(args.num_panels, width);
  const int64_t items = args.heads * parts;
  for (int64_t item = team.next_of_shares(items); item < items; item = team.next_of_shares(items)) {
    const int64_t head = item / parts, panel = item % parts * width, count = std::min(width, args.num_panels - panel);
    const std::byte* panels[Product::kMaxPanels];
    for (int64_t p = 0; p < count; ++p) panels[p] = expert_panel(each, head, panel + p, product.panel_bytes());
    for (int64_t first = 0, rows; first < args.rows; first += rows) {
      rows = std::min<int64_t>(Product::kMaxRows, args.rows - first);
      const float* x[Product::kMaxRows];
      for (int64_t r = 0; r < rows; ++r) x[r] = args.x + ((first + r) * args.heads + head) * in;
      product.set_rows(x, rows);
      product.multiply(panels, count);
      float* const y = args.y + (first * args.heads + head) * out;
      for (int64_t r = 0; r < rows; ++r) {
        float* const to = y + r * args.heads * out;
        for (int64_t p = 0; p < count; ++p)
          for (int64_t i = 0; i < kPanel; i += S::kWidth) {
            const int64_t col = (panel + p) * kPanel + i;
            if (col >= args.n) break;
            store_lanes<S>(to + col, S::load(product.sums() + p * product.stride() + r * kPanel + i), args.n - col);
          }
        if (panel == 0) std::copy_n(x[r] + args.k, args.kept, to + args.n);
      }
    }
  }
}

}  // namespace
}  // namespace ingot
