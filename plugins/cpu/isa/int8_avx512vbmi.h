// AVX512_VBMI beside VNNI.
#pragma once

#include "isa/int8_avx512.h"
#include "isa/tables_avx512.h"

namespace ingot {

struct TableInt8Avx512 : Int8Avx512 {
  // Four lines of 16 numbers of FP8, as they are.
  INGOT_INLINE void load_f8_lines(V (&to)[4], const void* p) {
    const __m512i codes = TablesAvx512::spread(static_cast<const uint8_t*>(p));
    __m512i pairs[2];
    TablesAvx512::look_up(pairs, kE4m3Bytes, codes, codes);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      to[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16));
      to[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    }
  }
};

}  // namespace ingot
