// Sixteen float32 lanes where tile registers are: AVX-512 with its conversion to bf16.
#pragma once

#include <cstring>

#include "simd_avx512.h"

namespace ingot {

struct SimdAmx : SimdAvx512 {
  // Denormal numbers become zero, which is what products of bf16 on tiles take them for.
  INGOT_INLINE void store_bf16(uint16_t* p, V v) {
    const __m256bh narrow = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &narrow, sizeof(narrow));
  }
};

}  // namespace ingot
