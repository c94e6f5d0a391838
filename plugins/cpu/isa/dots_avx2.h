// The instruction of dots_avxvnni.h in AVX2, with the same bits: sixteen bits hold a byte of either kind, and the sum
// of two of their products fits 32.
#pragma once

#include <immintrin.h>

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct DotsAvx2 {
  INGOT_INLINE void dot_mixed(__m256i& sum, __m256i bytes, __m256i signed_bytes) {
    const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF));
    const __m256i even_signed = _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8);
    const __m256i pairs =
        _mm256_add_epi32(_mm256_madd_epi16(even, even_signed),
                         _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(signed_bytes, 8)));
    sum = _mm256_add_epi32(sum, pairs);
  }
  INGOT_INLINE void dot_pairs(__m256i& sum, __m256i a, __m256i b) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  }
};

}  // namespace ingot
