// AVX512_VBMI, which all CPUs with AVX-512 BF16 have but Cooper Lake: codes become bf16 by tables of bytes.
#pragma once

#include <array>
#include <bit>

#include "isa/simd_avx512bf16.h"

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

struct TablePairsAvx512 : PairsAvx512 {
  // Two lines of 16 pairs, from four of 16 codes. kRows: that multiply them. Sums of more than eight leave no registers
  // for tables, and int8 takes little time without. -128 is no code: it would become zero.
  //
  // On a Zen 4, these instructions leave the ports of the dot product free, but vpermi2b, which costs half a dot
  // product. vpabsb would cost a whole one.
  template <int kRows>
    requires(kRows <= 8)
  INGOT_INLINE void load_two_lines(V (&to)[2], const int8_t* lines) {
    const __m512i codes = spread(lines), sizes = _mm512_min_epu8(codes, _mm512_sub_epi8(_mm512_setzero_si512(), codes));
    look_up(to, kInt8Bytes, sizes, codes);
  }
  template <int kRows>
  INGOT_INLINE void load_two_lines(V (&to)[2], const uint8_t* lines) {
    const __m512i codes = spread(lines);
    look_up(to, kE4m3Bytes, codes, codes);
  }

 private:
  using Line = const uint8_t (*)[64];

  INGOT_INLINE __m512i load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
  template <typename T>
  INGOT_INLINE __m512i spread(const T* lines) {
    __m512i codes;
    asm("vpermb %2, %1, %0"
        : "=v"(codes)
        : "v"(load_bytes(kCodesOfPairs.from.data())), "m"(*reinterpret_cast<Line>(lines)));
    return codes;
  }
  // Bytes of two tables, by the lower seven bits of `at`.
  INGOT_INLINE __m512i bytes_at(__m512i at, const std::array<uint8_t, 128>& table) {
    asm("vpermi2b %2, %1, %0" : "+v"(at) : "v"(load_bytes(table.data())), "v"(load_bytes(table.data() + 64)));
    return at;
  }
  INGOT_INLINE void look_up(V (&to)[2], const Bf16Bytes& bytes, __m512i sizes, __m512i codes) {
    constexpr int kOrAnd = 0xF8;  // a | b & c
    const __m512i lower = bytes_at(sizes, bytes.lower);
    const __m512i upper =
        _mm512_ternarylogic_epi32(bytes_at(sizes, bytes.upper), codes, _mm512_set1_epi8(-128), kOrAnd);
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lower, upper));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lower, upper));
  }
};

}  // namespace ingot
