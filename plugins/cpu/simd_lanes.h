// Loads and stores of the first n elements of a row, n counting to the row's end, in float32 or bf16 storage, and loads of
// whole vectors of bytes.
#pragma once

#include <cstdint>

namespace ingot {
namespace {

template <typename S>
[[gnu::always_inline]] inline typename S::V load_lanes(const float* p, int64_t n) {
  return n >= S::kWidth ? S::load(p) : S::load_partial(p, n);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V load_lanes(const uint16_t* p, int64_t n) {
  return n >= S::kWidth ? S::load_bf16(p) : S::load_bf16_partial(p, n);
}

template <typename S>
[[gnu::always_inline]] inline void store_lanes(float* p, typename S::V v, int64_t n) {
  n >= S::kWidth ? S::store(p, v) : S::store_partial(p, v, n);
}

template <typename S>
[[gnu::always_inline]] inline void store_lanes(uint16_t* p, typename S::V v, int64_t n) {
  n >= S::kWidth ? S::store_bf16(p, v) : S::store_bf16_partial(p, v, n);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V load_full(const float* p) {
  return S::load(p);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V load_full(const uint16_t* p) {
  return S::load_bf16(p);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V load_full(const int8_t* p) {
  return S::load_i8(p);
}

}  // namespace
}  // namespace ingot
