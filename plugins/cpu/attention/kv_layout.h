// One KV head of one block: its numbers and, where they are codes (int8_t, or uint8_t for FP8, E4M3), behind them a
// float32 scale per token. A code times its token's scale is what it stands for.
//
//   keys    [block_size / 16][dim / pair][16 tokens][pair]          pair: two dims in bf16, else one
//   values  [padded_dim / 16][block_size / pair][16 dims][pair]     pair: two tokens in bf16, else one
//
// A line is 16 lanes of pairs, in bf16 64 bytes: one row of the right operand of an AMX product, and for others one
// load whose low and high halves are two vectors. 16 lines of bf16 are a tile register. In numpy: kv_layout.py.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ingot {
namespace {

constexpr int64_t kKvLanes = 16;

template <typename T>
constexpr bool kScaled = sizeof(T) == 1;
template <typename T>
constexpr int64_t kPair = std::is_same_v<std::remove_const_t<T>, uint16_t> ? 2 : 1;
template <typename T>
constexpr int64_t kLine = kKvLanes * kPair<T>;  // elements

// Elements of T between a head and the next one.
template <typename T>
[[gnu::always_inline]] inline int64_t kv_head_size(int64_t dim, int64_t block_size) {
  return (dim + (kScaled<T> ? int64_t{sizeof(float) / sizeof(T)} : 0)) * block_size;
}

// The scales [block_size] behind a head's numbers.
template <typename T>
[[gnu::always_inline]] inline float* kv_scales(T* head, int64_t dim, int64_t block_size) {
  return reinterpret_cast<float*>(head + dim * block_size);
}

// The first line of 16 keys, of which `slot` is one; their other lines follow.
template <typename T>
[[gnu::always_inline]] inline T* key_lines(T* head, int64_t dim, int64_t slot) {
  return head + slot / kKvLanes * kKvLanes * dim;
}

// The line of `slot` and its pair in the first 16 dims; other tokens' lines follow, those of the next 16 dims lie
// kKvLanes * block_size further on.
template <typename T>
[[gnu::always_inline]] inline T* value_line(T* head, int64_t slot) {
  return head + slot / kPair<T> * kLine<T>;
}

}  // namespace
}  // namespace ingot
