// The instructions of dots_vex.h in AVX2, with the same bits: sixteen bits hold a byte of either kind, and the sum of
// two of their products fits 32.
#pragma once

#include <immintrin.h>

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct DotsEmulated {
  static constexpr bool kSigned = false;
  INGOT_INLINE void dot_mixed(__m256i& sum, __m256i bytes, __m256i signed_bytes) {
    const __m256i mask = _mm256_set1_epi16(0xFF);
    add(sum, _mm256_and_si256(bytes, mask), _mm256_srli_epi16(bytes, 8), signed_bytes);
  }

 protected:
  // even, odd: the bytes of one factor in 16 bits
  INGOT_INLINE void add(__m256i& sum, __m256i even, __m256i odd, __m256i signed_bytes) {
    const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(even, even_signed(signed_bytes)),
                                           _mm256_madd_epi16(odd, _mm256_srai_epi16(signed_bytes, 8)));
    sum = _mm256_add_epi32(sum, pairs);
  }
  INGOT_INLINE __m256i even_signed(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
};

struct SignedDotsEmulated : DotsEmulated {
  static constexpr bool kSigned = true;
  INGOT_INLINE void dot_signed(__m256i& sum, __m256i a, __m256i b) {
    add(sum, even_signed(a), _mm256_srai_epi16(a, 8), b);
  }
};

}  // namespace ingot
