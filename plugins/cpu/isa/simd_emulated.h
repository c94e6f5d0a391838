// Sixteen float32 lanes in plain C++, with the bits of simd_avx512.h: compiles and tests the 16-wide kernel templates
// on machines without AVX-512. The interface is described in simd_avx2.h. Lanes are a vector of the compiler's, which
// it cuts into what the machine has; loops over arrays would take minutes to compile under sanitizers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa/code_lines.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // how vectors pass between functions: all of these are inlined

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct SimdEmulated {
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 8;  // really none: few, so that what is unrolled stays small
  using Floats = float __attribute__((vector_size(64)));
  using Ints = int32_t __attribute__((vector_size(64)));
  using Words = uint32_t __attribute__((vector_size(64)));
  struct V {
    Floats lane;
  };
  struct Mask {
    Ints lane;  // -1 or 0
  };

  INGOT_INLINE V zero() { return {Floats{}}; }
  INGOT_INLINE V set1(float x) { return {x - Floats{}}; }  // + would lose the sign of -0
  INGOT_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  INGOT_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof(v)); }
  INGOT_INLINE V load_partial(const float* p, int64_t n) {
    V v = zero();
    std::memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
    return v;
  }
  INGOT_INLINE void store_partial(float* p, V v, int64_t n) {
    std::memcpy(p, &v, static_cast<size_t>(n) * sizeof(float));
  }

  INGOT_INLINE V add(V a, V b) { return {a.lane + b.lane}; }
  INGOT_INLINE V sub(V a, V b) { return {a.lane - b.lane}; }
  INGOT_INLINE V mul(V a, V b) { return {a.lane * b.lane}; }
  INGOT_INLINE V div(V a, V b) { return {a.lane / b.lane}; }
  INGOT_INLINE V fma(V a, V b, V c) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) c.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
  }
  INGOT_INLINE void accumulate(V& sum, V a, V b) { sum = fma(a, b, sum); }
  INGOT_INLINE V max(V a, V b) { return {a.lane > b.lane ? a.lane : b.lane}; }
  INGOT_INLINE V min(V a, V b) { return {a.lane < b.lane ? a.lane : b.lane}; }
  INGOT_INLINE V sqrt(V a) {
    for (int i = 0; i < kWidth; ++i) a.lane[i] = std::sqrt(a.lane[i]);
    return a;
  }
  INGOT_INLINE V abs(V a) { return from_words(to_words(a) & 0x7FFFFFFFu); }
  INGOT_INLINE V max_abs(V a, V b) {
    const Words top = to_words(a), size = to_words(abs(b));
    return from_words(top > size ? top : size);
  }

  INGOT_INLINE Mask less(V a, V b) { return {a.lane < b.lane}; }
  INGOT_INLINE Mask less_equal(V a, V b) { return {a.lane <= b.lane}; }
  INGOT_INLINE Mask first_lanes(int64_t n) {
    const Ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return {index < static_cast<int32_t>(n)};
  }
  INGOT_INLINE V select(Mask m, V yes, V no) { return {m.lane ? yes.lane : no.lane}; }

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

  INGOT_INLINE V reduce_add(const V (&rows)[8]) {
    V v{};
    for (int i = 0; i < 8; ++i) v.lane[i] = reduce_add(rows[i]);
    return v;
  }
  INGOT_INLINE V reduce_max(const V (&rows)[8]) {
    V v{};
    for (int i = 0; i < 8; ++i) v.lane[i] = reduce_max(rows[i]);
    return v;
  }

  INGOT_INLINE V add_exponent(V p, V t) { return from_words(to_words(p) + (to_words(t) << 23)); }

  INGOT_INLINE V load_bf16(const uint16_t* p) { return load_bf16_partial(p, kWidth); }
  INGOT_INLINE V load_bf16_partial(const uint16_t* p, int64_t n) {
    uint32_t bits[kWidth] = {};
    for (int i = 0; i < n; ++i) bits[i] = static_cast<uint32_t>(p[i]) << 16;
    V v;
    std::memcpy(&v, bits, sizeof(v));
    return v;
  }
  INGOT_INLINE void store_bf16(uint16_t* p, V v) { store_bf16_partial(p, v, kWidth); }
  INGOT_INLINE void store_bf16_partial(uint16_t* p, V v, int64_t n) {
    const Words stored = rounded(v) >> 16;
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(stored[i]);
  }

  INGOT_INLINE V load_f16(const uint16_t* p) {
    V v;
    for (int i = 0; i < kWidth; ++i) {
      const int size = p[i] & 0x7FFF, exponent = size >> 10, fraction = size & 0x3FF;
      const float number = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                           : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                            : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
      v.lane[i] = (p[i] & 0x8000) != 0 ? -number : number;
    }
    return v;
  }
  INGOT_INLINE V load_i8(const int8_t* p) {
    V v;
    for (int i = 0; i < kWidth; ++i) v.lane[i] = static_cast<float>(p[i]);
    return v;
  }
  INGOT_INLINE void store_i8(int8_t* p, V v) {
    for (int i = 0; i < kWidth; ++i) p[i] = static_cast<int8_t>(std::nearbyint(v.lane[i]));
  }

  INGOT_INLINE V load_e4m3(const uint8_t* p) {
    V v;
    for (int i = 0; i < kWidth; ++i) {
      const int exponent = p[i] >> 3 & 15, fraction = p[i] & 7;
      const float size = exponent > 0 ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                      : std::ldexp(static_cast<float>(fraction), -9);
      v.lane[i] = (p[i] & 0x80) != 0 ? -size : size;
    }
    return v;
  }
  INGOT_INLINE void store_e4m3(uint8_t* p, V v) {
    for (int i = 0; i < kWidth; ++i) {
      const float size = std::fabs(v.lane[i]);
      int exponent = 0;
      std::frexp(std::max(size, 0x1p-6f), &exponent);  // denormal numbers have that of the smallest normal one
      exponent -= 1;
      // Eighths of 2^exponent: 8 are the next exponent's first code, where the last one is rounded up.
      const int eighths = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
      const int code = std::min((exponent + 6) * 8 + eighths, 0x7E);
      p[i] = static_cast<uint8_t>(code | (std::signbit(v.lane[i]) ? 0x80 : 0));
    }
  }

  INGOT_INLINE void load_columns(const float* p, int64_t stride, V (&columns)[kWidth]) {
    for (int i = 0; i < kWidth; ++i)
      for (int row = 0; row < kWidth; ++row) columns[i].lane[row] = p[row * stride + i];
  }

  INGOT_INLINE void load_bf16_pairs(const void* p, V& even, V& odd) {
    Words bits;
    std::memcpy(&bits, p, sizeof(bits));
    even = from_words(bits << 16);
    odd = from_words(bits & 0xFFFF0000u);
  }

  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const Words pairs = (rounded(even) >> 16) | (rounded(odd) & 0xFFFF0000u);
    std::memcpy(p, &pairs, sizeof(pairs));
  }

  INGOT_INLINE V load_bf16_even(const uint16_t* p) {
    V even, odd;
    load_bf16_pairs(p, even, odd);
    return even;
  }
  INGOT_INLINE V load_bf16_odd(const uint16_t* p) {
    V even, odd;
    load_bf16_pairs(p, even, odd);
    return odd;
  }

  INGOT_INLINE void prefetch(const void*) {}
  INGOT_INLINE void prefetch_far(const void*) {}
  INGOT_INLINE void prefetch_stream(const void*) {}
  static constexpr int kReadingRows = 1;
  INGOT_INLINE void prefetch_reading(const void*) {}
  INGOT_INLINE void prefetch_streams(const void*, const void*) {}

 protected:
  INGOT_INLINE Words to_words(V v) { return std::bit_cast<Words>(v.lane); }
  INGOT_INLINE Words rounded(V v) {
    const Words bits = to_words(v);
    return v.lane == v.lane ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u;
  }
  INGOT_INLINE V from_words(Words bits) { return {std::bit_cast<Floats>(bits)}; }
};

// The lanes of simd_avx512bf16.h, bit for bit.
struct PairsEmulated : SimdEmulated {
  INGOT_INLINE void accumulate(V& sum, V a, V b) { add_products(sum, a, b); }

  INGOT_INLINE V round_pairs(V first, V second) {
    const Words low = rounded(normal(first)) >> 16, high = rounded(normal(second)) >> 16;
    V pairs{};
    for (int i = 0; i < kWidth; ++i) {
      const auto half = [&](int at) { return at < kWidth ? low[at] : high[at - kWidth]; };
      pairs.lane[i] = std::bit_cast<float>(half(2 * i) | half(2 * i + 1) << 16);
    }
    return pairs;
  }
  INGOT_INLINE V load_i8_pairs(const int8_t* first, const int8_t* second) {
    return from_words(to_words(load_i8(first)) >> 16 | to_words(load_i8(second)));
  }
  INGOT_INLINE V load_e4m3_pairs(const uint8_t* first, const uint8_t* second) {
    return from_words(to_words(load_e4m3(first)) >> 16 | to_words(load_e4m3(second)));
  }
  // Like add_products, no part of the tiles that call them.
  template <int>
  [[gnu::noinline]] static void load_i8_quads(V (&to)[2], const int8_t* codes) {
    quads(to, [codes](int at) { return static_cast<float>(codes[at]); });
  }
  [[gnu::noinline]] static void load_byte_quads(V (&to)[2], const int8_t* codes) { load_i8_quads<1>(to, codes); }
  using ValueTable = const int8_t*;
  INGOT_INLINE ValueTable value_table(const int8_t* values) { return values; }
  template <int64_t kBits, int kQuad>
  [[gnu::noinline]] static void load_value_quads(V (&to)[2], const void* line, ValueTable values) {
    quads(to, [=](int at) { return static_cast<float>(values[code<kBits, kQuad>(line, at)]); });
  }
  template <int64_t kBits, int kQuad>
  [[gnu::noinline]] static void load_code_quads(V (&to)[2], const void* line) {
    quads(to, [=](int at) { return static_cast<float>(code<kBits, kQuad>(line, at) - CodeLines<kBits>::kBias); });
  }
  INGOT_INLINE V keep_bits(V pairs, uint32_t bits) { return from_words(to_words(pairs) & bits); }
  using UpperBytes = const uint8_t*;
  INGOT_INLINE UpperBytes upper_bytes(const void* p) { return static_cast<const uint8_t*>(p); }
  template <int kLine>
  INGOT_INLINE V restored_pairs(const void* block, UpperBytes upper) {
    const auto* codes = static_cast<const uint8_t*>(block);
    const uint8_t* lower = codes + 64 * (1 + kLine / 2);
    Words pairs{};
    for (int i = 0; i < 2 * kWidth; ++i) {
      const int at = i / 8 * 16 + kLine % 2 * 8 + i % 8;
      const uint32_t number = static_cast<uint32_t>(upper[codes[at] >> (kLine / 2 * 4) & 15]) << 8 | lower[at];
      pairs[i / 2] |= number << (i % 2 * 16);
    }
    return from_words(pairs);
  }

 private:
  // Number `at` of line kQuad of those that lines of low bits and one of upper bits make.
  template <int64_t kBits, int kQuad>
  INGOT_INLINE int code(const void* lines, int at) {
    using Codes = CodeLines<kBits>;
    const auto* bytes = static_cast<const uint8_t*>(lines);
    const auto field = [&](int line, int index, int bits) {
      return bytes[line * 64 + at] >> (index * bits) & ((1 << bits) - 1);
    };
    const int low = field(kQuad / Codes::kLowQuads, kQuad % Codes::kLowQuads, Codes::kLow);
    return low | (Codes::kUpper > 0 ? field(Codes::kLowLines, kQuad, Codes::kUpper) << Codes::kLow : 0);
  }
  template <typename F>
  INGOT_INLINE void quads(V (&to)[2], F number) {
    for (int i = 0; i < 2; ++i) {
      Words pairs{};
      for (int at = 0; at < kWidth; ++at)
        for (int odd = 0; odd < 2; ++odd)
          pairs[at] |= std::bit_cast<uint32_t>(number(4 * at + 2 * i + odd)) >> 16 << (16 * odd);
      to[i] = from_words(pairs);
    }
  }
  // No part of the tiles that call it, which would take long to compile.
  [[gnu::noinline]] static void add_products(V& sum, const V& a, const V& b) {
    const V odd = normal(fma(normal(odd_of(a)), normal(odd_of(b)), normal(sum)));
    sum = normal(fma(normal(even_of(a)), normal(even_of(b)), odd));
  }
  INGOT_INLINE V even_of(V pairs) { return from_words(to_words(pairs) << 16); }
  INGOT_INLINE V odd_of(V pairs) { return from_words(to_words(pairs) & 0xFFFF0000u); }
  // Denormal numbers become zeros of their sign.
  INGOT_INLINE V normal(V v) {
    const Words bits = to_words(v);
    return from_words((bits & 0x7F800000u) == 0 ? bits & 0x80000000u : bits);
  }
};

}  // namespace ingot
