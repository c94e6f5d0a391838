// The dot product of bytes of CPUs without AVX-512, in its VEX form: four products of each lane of 32 bits are added
// to its sum, modulo 2^32. asm: the compiler need not know it, and sums stay in registers (see accumulate in
// simd_avx2.h).
#pragma once

#include <immintrin.h>

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct DotsAvxVnni {
  INGOT_INLINE void dot_mixed(__m256i& sum, __m256i bytes, __m256i signed_bytes) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(bytes), "x"(signed_bytes));
  }
  INGOT_INLINE void dot_pairs(__m256i& sum, __m256i a, __m256i b) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
};

}  // namespace ingot
