// Lines of 16 pairs of bf16 for the dot product, as they are or from codes, exact.
#pragma once

#include <cstdint>

#include "ingot/kernel.h"

namespace ingot {
namespace {

// Numbers of a line. Of codes it is made of two lines of 16, the first and the second number of each pair.
constexpr int64_t kPairLine = 32;

template <typename S>
[[gnu::always_inline]] inline typename S::V load_pairs(const uint16_t* line) {
  return S::load(reinterpret_cast<const float*>(line));
}
template <typename S>
[[gnu::always_inline]] inline typename S::V load_pairs(const int8_t* line) {
  return S::load_i8_pairs(line, line + kPairLine / 2);
}
template <typename S>
[[gnu::always_inline]] inline typename S::V load_pairs(const uint8_t* line) {
  return S::load_e4m3_pairs(line, line + kPairLine / 2);
}

// Neighbouring lines. kRows: that multiply them.
template <typename S, int kRows, int kLines, typename T>
[[gnu::always_inline]] inline void load_lines(typename S::V (&to)[kLines], const T* line) {
  if constexpr (kLines == 2 && requires { S::template load_two_lines<kRows>(to, line); }) {
    S::template load_two_lines<kRows>(to, line);
  } else {
    for (int i = 0; i < kLines; ++i) to[i] = load_pairs<S>(line + i * kPairLine);
  }
}

}  // namespace
}  // namespace ingot
