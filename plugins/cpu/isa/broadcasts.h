// Products of rows of numbers with several vectors each.
#pragma once

#include <cstdint>

namespace ingot {
namespace {

// sums[row][g] += x[row] . lines[g], line after line. x: what S multiplies a line by, for each line; rows lie `stride`
// apart. On a Zen 4, to load a broadcast to a register takes time beside the products. A product that loads the
// broadcast itself takes no longer than others. An Intel CPU loads less often than it multiplies. So several vectors
// share a register in every other row.
template <typename S, int kRows, int kG, int kLines>
[[gnu::always_inline]] inline void add_products(typename S::V (&sums)[kRows][kG], const float* x, int64_t stride,
                                                const typename S::V (&lines)[kG][kLines]) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) {
      if constexpr (requires { S::accumulate_from(sums[0][0], *x, lines[0][0]); }) {
        if (kG == 1 || row % 2 == 1) {
#pragma GCC unroll 16
          for (int g = 0; g < kG; ++g) {
            auto sum = sums[row][g];  // a reference to one of so many would keep them in memory
            S::accumulate_from(sum, x[row * stride + line], lines[g][line]);
            sums[row][g] = sum;
          }
          continue;
        }
      }
      const auto each = S::set1(x[row * stride + line]);
#pragma GCC unroll 16
      for (int g = 0; g < kG; ++g) {
        auto sum = sums[row][g];
        S::accumulate(sum, each, lines[g][line]);
        sums[row][g] = sum;
      }
    }
}

}  // namespace
}  // namespace ingot
