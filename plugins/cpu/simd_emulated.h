// Sixteen float32 lanes in plain C++, with the bits of simd_avx512.h: compiles and tests the 16-wide kernel templates
// on machines without AVX-512. The interface is described in simd_avx2.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct SimdEmulated {
  static constexpr int kWidth = 16;
  struct V {
    float lane[kWidth];
  };
  struct Mask {
    bool lane[kWidth];
  };

  INGOT_INLINE V zero() { return set1(0.0f); }
  INGOT_INLINE V set1(float x) {
    return each([&](int) { return x; });
  }
  INGOT_INLINE V load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  INGOT_INLINE void store(float* p, V v) { store_partial(p, v, kWidth); }
  INGOT_INLINE V load_partial(const float* p, int64_t n) {
    return each([&](int i) { return i < n ? p[i] : 0.0f; });
  }
  INGOT_INLINE void store_partial(float* p, V v, int64_t n) {
    for (int i = 0; i < n; ++i) p[i] = v.lane[i];
  }

  INGOT_INLINE V add(V a, V b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  INGOT_INLINE V sub(V a, V b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  INGOT_INLINE V mul(V a, V b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  INGOT_INLINE V div(V a, V b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  INGOT_INLINE V fma(V a, V b, V c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  INGOT_INLINE void accumulate(V& sum, V a, V b) { sum = fma(a, b, sum); }
  INGOT_INLINE V max(V a, V b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  INGOT_INLINE V min(V a, V b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  INGOT_INLINE V sqrt(V a) {
    return each([&](int i) { return std::sqrt(a.lane[i]); });
  }
  INGOT_INLINE V abs(V a) {
    return each([&](int i) { return std::fabs(a.lane[i]); });
  }

  INGOT_INLINE Mask less(V a, V b) {
    Mask m;
    for (int i = 0; i < kWidth; ++i) m.lane[i] = a.lane[i] < b.lane[i];
    return m;
  }
  INGOT_INLINE Mask less_equal(V a, V b) {
    Mask m;
    for (int i = 0; i < kWidth; ++i) m.lane[i] = a.lane[i] <= b.lane[i];
    return m;
  }
  INGOT_INLINE Mask first_lanes(int64_t n) {
    Mask m;
    for (int i = 0; i < kWidth; ++i) m.lane[i] = i < n;
    return m;
  }
  INGOT_INLINE V select(Mask m, V yes, V no) {
    return each([&](int i) { return m.lane[i] ? yes.lane[i] : no.lane[i]; });
  }

  INGOT_INLINE float reduce_add(V v) {
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) v.lane[i] += v.lane[i + half];
    return v.lane[0];
  }
  INGOT_INLINE float reduce_max(V v) {
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
    return v.lane[0];
  }

  INGOT_INLINE V add_exponent(V p, V t) {
    return each([&](int i) {
      return std::bit_cast<float>(std::bit_cast<uint32_t>(p.lane[i]) + (std::bit_cast<uint32_t>(t.lane[i]) << 23));
    });
  }

  INGOT_INLINE V load_bf16(const uint16_t* p) { return load_bf16_partial(p, kWidth); }
  INGOT_INLINE V load_bf16_partial(const uint16_t* p, int64_t n) {
    return each([&](int i) { return i < n ? std::bit_cast<float>(static_cast<uint32_t>(p[i]) << 16) : 0.0f; });
  }
  INGOT_INLINE void store_bf16(uint16_t* p, V v) { store_bf16_partial(p, v, kWidth); }
  INGOT_INLINE void store_bf16_partial(uint16_t* p, V v, int64_t n) {
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(v.lane[i]);
      const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
      p[i] = static_cast<uint16_t>(std::isnan(v.lane[i]) ? (bits >> 16) | 0x40 : rounded);
    }
  }

  INGOT_INLINE void load_bf16_pairs(const void* p, V& even, V& odd) {
    const uint32_t* bits = static_cast<const uint32_t*>(p);
    even = each([&](int i) { return std::bit_cast<float>(bits[i] << 16); });
    odd = each([&](int i) { return std::bit_cast<float>(bits[i] & 0xFFFF0000u); });
  }

  INGOT_INLINE void prefetch(const void*) {}

 private:
  template <typename F>
  INGOT_INLINE V each(F f) {
    V v;
    for (int i = 0; i < kWidth; ++i) v.lane[i] = f(i);
    return v;
  }
};

}  // namespace ingot
