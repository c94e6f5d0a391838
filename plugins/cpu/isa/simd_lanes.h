// Loads and stores of the first n elements of a row, n counting to the row's end, in float32 or bf16 storage, and loads
// of whole vectors from lines of a KV cache.
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

// kWidth numbers of one half of a line of the KV cache (kv_layout.h); only lines of bf16 have two halves.
template <typename S, int kHalf>
[[gnu::always_inline]] inline typename S::V load_half(const float* p) {
  return S::load(p);
}

template <typename S, int kHalf>
[[gnu::always_inline]] inline typename S::V load_half(const uint16_t* p) {
  return kHalf == 0 ? S::load_bf16_even(p) : S::load_bf16_odd(p);
}

template <typename S, int kHalf>
[[gnu::always_inline]] inline typename S::V load_half(const int8_t* p) {
  return S::load_i8(p);
}

template <typename S, int kHalf>
[[gnu::always_inline]] inline typename S::V load_half(const uint8_t* p) {
  return S::load_e4m3(p);
}

}  // namespace
}  // namespace ingot
