// One KV head of one block: its numbers and, where they are int8 codes, behind them a float32 scale per token. A code
// times its token's scale is what it stands for. Layout: KvLayout in src/ingot/plan.py.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ingot {
namespace {

template <typename T>
constexpr bool kScaled = std::is_same_v<T, int8_t>;

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

}  // namespace
}  // namespace ingot
