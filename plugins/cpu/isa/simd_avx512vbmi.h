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

// Where the bytes of two lines of pairs come from: of four lines of 16 codes, from the lower bytes (0 to 63) and the
// upper ones (64 to 127).
struct alignas(64) BytesOfPairs {
  std::array<uint8_t, 64> line[2]{};

  static constexpr BytesOfPairs of_two_lines() {
    BytesOfPairs made;
    for (int line = 0; line < 2; ++line)
      for (int i = 0; i < 64; ++i)
        made.line[line][i] = static_cast<uint8_t>(i % 2 * 64 + line * 32 + i / 2 % 2 * 16 + i / 4);
    return made;
  }
};
constexpr BytesOfPairs kBytesOfPairs = BytesOfPairs::of_two_lines();

struct TablePairsAvx512 : PairsAvx512 {
  // Two lines of 16 pairs, from four of 16 codes. kRows: that multiply them. Sums of more than eight leave no registers
  // for tables, and int8 takes little time without. -128 is no code: it would become zero.
  template <int kRows>
    requires(kRows <= 8)
  INGOT_INLINE void load_two_lines(V (&to)[2], const int8_t* lines) {
    const __m512i codes = _mm512_loadu_si512(lines);
    look_up(to, kInt8Bytes, _mm512_abs_epi8(codes), codes);
  }
  template <int kRows>
  INGOT_INLINE void load_two_lines(V (&to)[2], const uint8_t* lines) {
    const __m512i codes = _mm512_loadu_si512(lines);
    look_up(to, kE4m3Bytes, codes, codes);
  }

 private:
  INGOT_INLINE __m512i load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
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
    for (int line = 0; line < 2; ++line) {
      __m512i pairs = lower;
      asm("vpermt2b %2, %1, %0" : "+v"(pairs) : "v"(load_bytes(kBytesOfPairs.line[line].data())), "v"(upper));
      to[line] = _mm512_castsi512_ps(pairs);
    }
  }
};

}  // namespace ingot
