// AVX512_VBMI: codes become bf16 by tables of bytes. Files need no switch of the compiler for it: the CPU says whether
// it has it (permutes_bytes).
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>

#include "isa/simd_avx512.h"

namespace ingot {

// The upper and the lower bytes of bf16, by the seven bits of a code without its sign.
struct alignas(64) Bf16Bytes {
  std::array<uint8_t, 128> upper{}, lower{};

  template <typename F>
  static constexpr Bf16Bytes of(F value) {
    Bf16Bytes made;
    for (int i = 0; i < 128; ++i) {
      const auto bits = std::bit_cast<uint32_t>(value(i));
      made.upper[i] = static_cast<uint8_t>(bits >> 24), made.lower[i] = static_cast<uint8_t>(bits >> 16);
    }
    return made;
  }
};

constexpr Bf16Bytes kInt8Bytes = Bf16Bytes::of([](int size) { return static_cast<float>(size); });
// Three bits behind the point, of which denormal numbers are multiples of 2^-9. None is NaN.
constexpr Bf16Bytes kE4m3Bytes = Bf16Bytes::of([](int code) {
  float value = static_cast<float>(code < 8 ? code : 8 + code % 8) * 0x1p-9f;
  for (int exponent = 1; exponent < code / 8; ++exponent) value *= 2;
  return value;
});

// Where codes go, of four lines of 16, so that bytes of two vectors, taken in turn within 16 bytes, make two lines of
// pairs: the first eight codes of each 16 bytes become a part of the first line, the others of the second line.
struct alignas(64) CodesOfPairs {
  std::array<uint8_t, 64> from{};

  static constexpr CodesOfPairs of_two_lines() {
    CodesOfPairs made;
    for (int i = 0; i < 64; ++i)
      made.from[i] = static_cast<uint8_t>((i / 8 % 2 * 2 + i % 2) * 16 + i / 16 * 4 + i % 8 / 2);
    return made;
  }
};
constexpr CodesOfPairs kCodesOfPairs = CodesOfPairs::of_two_lines();

struct TablesAvx512 {
  INGOT_INLINE __m512i load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
  // Four lines of 16 codes, each in its place.
  template <typename T>
  INGOT_INLINE __m512i spread(const T* lines) {
    __m512i codes;
    asm("vpermb %2, %1, %0"
        : "=v"(codes)
        : "v"(load_bytes(kCodesOfPairs.from.data())), "m"(*reinterpret_cast<const uint8_t (*)[64]>(lines)));
    return codes;
  }
  // Bytes of two tables, by the lower seven bits of `at`.
  INGOT_INLINE __m512i bytes_at(__m512i at, const std::array<uint8_t, 128>& table) {
    asm("vpermi2b %2, %1, %0" : "+v"(at) : "v"(load_bytes(table.data())), "v"(load_bytes(table.data() + 64)));
    return at;
  }
  // Bytes of the first 64 of a table.
  INGOT_INLINE __m512i bytes_of_64(__m512i at, const std::array<uint8_t, 128>& table) {
    __m512i bytes;
    asm("vpermb %2, %1, %0" : "=v"(bytes) : "v"(at), "v"(load_bytes(table.data())));
    return bytes;
  }
  // Two lines of 16 pairs, by the codes of their sizes; signs are those of `codes`.
  INGOT_INLINE void look_up(__m512i (&to)[2], const Bf16Bytes& bytes, __m512i sizes, __m512i codes) {
    constexpr int kOrAnd = 0xF8;  // a | b & c
    const __m512i lower = bytes_at(sizes, bytes.lower);
    const __m512i upper =
        _mm512_ternarylogic_epi32(bytes_at(sizes, bytes.upper), codes, _mm512_set1_epi8(-128), kOrAnd);
    to[0] = _mm512_unpacklo_epi8(lower, upper);
    to[1] = _mm512_unpackhi_epi8(lower, upper);
  }
};

}  // namespace ingot
