// Sixteen float32 lanes where tile registers are: AVX-512, its conversion to bf16, and stores past the caches.
#pragma once

#include <cstring>

#include "isa/int8_avx512.h"

namespace ingot {

template <typename S>
struct Streaming : S {
  // A whole line that goes to memory past the caches. Others may read it behind fence().
  INGOT_INLINE void stream(float* line, typename S::V v) { _mm512_stream_ps(line, v); }
  INGOT_INLINE void fence() { _mm_sfence(); }
};

using Int8Amx = Streaming<Int8Avx512>;

struct SimdAmx : Streaming<SimdAvx512> {
  // Denormal numbers become zero, which is what products of bf16 on tiles take them for.
  INGOT_INLINE void store_bf16(uint16_t* p, V v) {
    const __m256bh narrow = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &narrow, sizeof(narrow));
  }
  INGOT_INLINE void store_bf16(uint16_t* p, V first, V second) {
    const __m512bh narrow = _mm512_cvtne2ps_pbh(second, first);
    std::memcpy(p, &narrow, sizeof(narrow));
  }
};

}  // namespace ingot
