// The loops of peak_flops.h as templates over a vector type: blocks of sums in registers, as matrix products keep them.
#pragma once

#include <cstring>

#include "measure/peak_flops.h"

namespace ingot {

// One by one, so that the sums of a loop stay in registers.
template <typename V, int kRows>
[[gnu::always_inline]] inline void keep_sums(std::byte* to, const V (&sum)[kRows][2]) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const V first = sum[row][0], second = sum[row][1];
    std::memcpy(to + 2 * row * sizeof(V), &first, sizeof(V));
    std::memcpy(to + (2 * row + 1) * sizeof(V), &second, sizeof(V));
  }
}

// kRows x 2 vectors of sums; per step of k kRows numbers of x and two vectors of weights. kPairs: pairs of bf16
// numbers.
template <typename S, int kRows, bool kPairs = false>
void peak_f32(const PeakData& data, std::byte* sums, int64_t rounds) {
  constexpr int kSteps = 64, kX = 2048;  // of numbers: the first half are weights, the second is x
  static_assert(kSteps * 2 * S::kWidth <= kX && kSteps * kRows <= kX);
  static_assert(sizeof(data.halves) == sizeof(data.numbers));
  const float* const numbers = kPairs ? reinterpret_cast<const float*>(data.halves) : data.numbers;
  typename S::V sum[kRows][2];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) sum[row][0] = sum[row][1] = S::zero();
  for (int64_t round = 0; round < rounds; ++round) {
    for (int64_t k = 0; k < kSteps; ++k) {
      const float* const weights = numbers + k * 2 * S::kWidth;
      const typename S::V a = S::load(weights), b = S::load(weights + S::kWidth);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const typename S::V x = S::set1(numbers[kX + k * kRows + row]);
        S::accumulate(sum[row][0], a, x);
        S::accumulate(sum[row][1], b, x);
      }
    }
  }
  keep_sums(sums, sum);
}
template <typename S, int kRows>
constexpr int64_t kF32Operations = int64_t{2} * 64 * kRows * 2 * S::kWidth;

// The same in int8: a vector holds four k of each of its lanes of 32 bits.
template <typename S, int kRows>
void peak_int8(const PeakData& data, std::byte* sums, int64_t rounds) {
  using V = decltype(S::load_x(nullptr));
  constexpr int kSteps = 64, kX = kSteps * 2 * sizeof(V);
  static_assert(kX + kSteps * 4 * kRows <= sizeof(data.bytes));
  V sum[kRows][2];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) sum[row][0] = sum[row][1] = V{};
  for (int64_t round = 0; round < rounds; ++round) {
    for (int64_t k = 0; k < kSteps; ++k) {
      V a, b;
      std::memcpy(&a, data.bytes + k * 2 * sizeof(V), sizeof(V));
      std::memcpy(&b, data.bytes + (k * 2 + 1) * sizeof(V), sizeof(V));
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const V x = S::load_x(data.bytes + kX + 4 * (k * kRows + row));
        S::dot(sum[row][0], a, x);
        S::dot(sum[row][1], b, x);
      }
    }
  }
  keep_sums(sums, sum);
}
template <typename S, int kRows>
constexpr int64_t kInt8Operations = 4 * kF32Operations<S, kRows>;

}  // namespace ingot
