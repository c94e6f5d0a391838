// AVX512_VBMI, which all CPUs with AVX-512 BF16 have but Cooper Lake, beside the dot product of bf16.
#pragma once

#include "isa/simd_avx512bf16.h"
#include "isa/tables_avx512.h"

namespace ingot {

struct TablePairsAvx512 : PairsAvx512 {
  // Two lines of 16 pairs, from four of 16 codes. kRows: that multiply them. Sums of more than eight leave no registers
  // for tables, and int8 takes little time without. -128 is no code: it would become zero.
  //
  // On a Zen 4, these instructions leave the ports of the dot product free, but vpermi2b, which costs half a dot
  // product. vpabsb would cost a whole one.
  template <int kRows>
    requires(kRows <= 8)
  INGOT_INLINE void load_two_lines(V (&to)[2], const int8_t* lines) {
    const __m512i codes = TablesAvx512::spread(lines),
                  sizes = _mm512_min_epu8(codes, _mm512_sub_epi8(_mm512_setzero_si512(), codes));
    look_up(to, kInt8Bytes, sizes, codes);
  }
  template <int kRows>
  INGOT_INLINE void load_two_lines(V (&to)[2], const uint8_t* lines) {
    const __m512i codes = TablesAvx512::spread(lines);
    look_up(to, kE4m3Bytes, codes, codes);
  }
  // More rows leave no registers for tables.
  template <int kRows>
  INGOT_INLINE void load_i8_quads(V (&to)[2], const int8_t* quads) {
    if constexpr (kRows > 8) {
      PairsAvx512::load_i8_quads<kRows>(to, quads);
    } else {
      const __m512i codes = in_pairs(_mm512_loadu_si512(quads)),
                    sizes = _mm512_min_epu8(codes, _mm512_sub_epi8(_mm512_setzero_si512(), codes));
      look_up(to, kInt8Bytes, sizes, codes);
    }
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE void load_code_quads(V (&to)[2], const void* lines) {
    static constexpr Bf16Bytes kBytes =
        Bf16Bytes::of([](int code) { return static_cast<float>(code % (1 << kBits) - CodeLines<kBits>::kBias); });
    const __m512i codes = in_pairs(Int8Avx512::line_codes<kBits, kQuad>(lines));
    interleave(to, TablesAvx512::bytes_of_64(codes, kBytes.lower), TablesAvx512::bytes_of_64(codes, kBytes.upper));
  }

 private:
  INGOT_INLINE void look_up(V (&to)[2], const Bf16Bytes& bytes, __m512i sizes, __m512i codes) {
    __m512i pairs[2];
    TablesAvx512::look_up(pairs, bytes, sizes, codes);
    to[0] = _mm512_castsi512_ps(pairs[0]);
    to[1] = _mm512_castsi512_ps(pairs[1]);
  }
};

}  // namespace ingot
