// Rows that are rounded to int8 for products: each by its largest number, in the order in which tiles read them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "isa/row_absmax.h"
#include "isa/simd_lanes.h"
#include "matmul/matmul_parts.h"
#include "matmul/quantised.h"

namespace ingot {
namespace {

// How a row becomes codes of int8.
struct RowCode {
  float step;     // what a step of the codes is worth, NaN for a row that is not finite
  float inverse;  // codes per unit
  int64_t coded;  // all of k; 0 where the codes are zeros: not finite, or too small for 127 over it
};

template <typename I>
RowCode row_code(const float* x, int64_t k) {
  const float top = row_absmax<I>(x, k), inverse = 127.0f / top;
  const bool codes = top <= kLargest && inverse <= kLargest;
  return {top <= kLargest ? top / 127.0f : NAN, codes ? inverse : 0.0f, codes ? k : 0};
}

// The 64 codes from `at` on, zeros beyond the row.
template <typename I>
[[gnu::always_inline]] inline void store_codes(const RowCode& code, const float* x, int64_t at, int8_t* to) {
  using V = typename I::V;
  const V factor = I::set1(code.inverse);
  const int64_t left = code.coded - at;
  V line[kTileK / I::kWidth];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kTileK; i += I::kWidth) {
    const V v = left >= kTileK ? I::load(x + at + i) : left > i ? load_lanes<I>(x + at + i, left - i) : I::zero();
    line[i / I::kWidth] = I::mul(v, factor);
  }
  I::store_i8_line(to, line);
}

// 64 codes → their sums, `each` at a time, which is 8, 16, 32 or 64. Returns how many these are.
template <typename I>
[[gnu::always_inline]] inline int sum_codes(const int8_t* line, int64_t each, int16_t (&sums)[kTileK / 8]) {
  I::sum_eights(line, sums);
  int count = kTileK / 8;
  for (; count * each > kTileK; count /= 2)
    for (int i = 0; i < count / 2; ++i) sums[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
  return count;
}

// Rounds a row, 64 codes after another to the place that place(k) names for the codes from k on. Returns its step.
template <typename I, typename Place>
float round_row(const float* x, int64_t k, int64_t padded_k, Place place) {
  const RowCode code = row_code<I>(x, k);
  for (int64_t at = 0; at < padded_k; at += kTileK) store_codes<I>(code, x, at, place(at));
  return code.step;
}

// Rows in groups of at most `most` that differ by one row at most: what a tile multiplies.
struct RowGroups {
  int64_t rows, most;

  int64_t count() const { return ceil_div(rows, most); }
  int64_t first(int64_t group) const { return rows * group / count(); }
};

// Where rounded rows lie. How the codes of a group lie in its part is up to the products.
struct RoundedRows {
  int64_t rows, k;
  std::byte* data;
  int64_t run_k = kShortestRun;  // of a short sum
  static constexpr int64_t kShortestRun = 16;

  int64_t padded_k() const { return ceil_div(k, 2 * kTileK) * 2 * kTileK; }
  int64_t stride() const { return padded_k() + kLineBytes; }  // bytes; no multiple of a page
  int64_t run_stride() const { return padded_k() / kShortestRun; }
  int64_t bytes() const { return header_bytes() + rows * stride(); }

  float* scales() const { return reinterpret_cast<float*>(data); }
  // Of short sums, and whether sums of whole groups are short as well: not all products need them.
  int32_t* runs(int64_t row) const { return are_short(rows) + row * run_stride(); }
  int32_t* are_short(int64_t row) const { return reinterpret_cast<int32_t*>(data) + rows + row; }
  int8_t* codes(int64_t row) const { return reinterpret_cast<int8_t*>(data + header_bytes() + row * stride()); }

 private:
  int64_t header_bytes() const { return ceil_div(rows * (2 + run_stride()) * 4, kLineBytes) * kLineBytes; }
};

// Rounds a group of rows of at most kMost: four codes of each row lie beside each other, then the next four, so that a
// tile reads them in one stream. A part of K after another, which stays in L1 until all rows have written to it.
// seen(row of the group, k, the 64 codes from k on)
template <typename I, int kMost, int64_t kPart, uint32_t kFlip, typename Seen>
[[gnu::always_inline]] inline void round_group(const RoundedRows& to, int64_t first, int64_t count,
                                               const float* const* x, const Seen& seen) {
  RowCode code[kMost];
  for (int64_t r = 0; r < count; ++r) {
    code[r] = row_code<I>(x[r], to.k);
    to.scales()[first + r] = code[r].step;
  }
  for (int64_t part = 0; part < to.padded_k(); part += kPart)
    for (int64_t r = 0; r < count; ++r) {
      int8_t* const codes = to.codes(first) + r * 4;
      for (int64_t k = part; k < std::min(part + kPart, to.padded_k()); k += kTileK) {
        alignas(kLineBytes) int8_t apart[kTileK];
        int8_t* const line = kFlip == 0 && count == 1 ? codes + k : apart;
        store_codes<I>(code[r], x[r], k, line);
        seen(r, k, line);
        if (line != apart) continue;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kTileK; i += 4) {
          uint32_t four;
          std::memcpy(&four, line + i, sizeof(four));
          four ^= kFlip;
          std::memcpy(codes + (k + i) * count, &four, sizeof(four));
        }
      }
    }
}

}  // namespace
}  // namespace ingot
