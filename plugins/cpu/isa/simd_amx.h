// Sixteen float32 lanes where tile registers are: AVX-512, its conversion to bf16, and stores past the caches.
#pragma once

#include <array>
#include <cstring>

#include "isa/int8_avx512.h"
#include "isa/tables_avx512.h"

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

// FP8 → bf16 on CPUs that permute bytes.
struct F8PairsAmx {
  // Two lines of 16 pairs, from four lines of 16 numbers: exact.
  INGOT_INLINE void store(void* to, const void* from) {
    __m512i pairs[2];
    widen(pairs, from);
    put(to, pairs);
  }
  // The same of numbers times the scales of their columns, rounded. Denormal numbers become zero.
  INGOT_INLINE void store(void* to, const void* from, __m512 scale) {
    __m512i pairs[2];
    widen(pairs, from);
    const __m512i order = _mm512_loadu_si512(kPairsOfHalves.data());
#pragma GCC unroll 2
    for (__m512i& line : pairs) {
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)),
                   odd = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
      const __m512bh halves = _mm512_cvtne2ps_pbh(_mm512_mul_ps(odd, scale), _mm512_mul_ps(even, scale));
      line = _mm512_permutexvar_epi16(order, reinterpret_cast<const __m512i&>(halves));
    }
    put(to, pairs);
  }

 private:
  // Words of two halves of a vector, one of each in turn.
  static constexpr std::array<uint16_t, 32> kPairsOfHalves = [] {
    std::array<uint16_t, 32> from{};
    for (uint16_t i = 0; i < 32; ++i) from[i] = static_cast<uint16_t>(i % 2 * 16 + i / 2);
    return from;
  }();

  INGOT_INLINE void put(void* to, const __m512i (&lines)[2]) {
    _mm512_storeu_si512(to, lines[0]);
    _mm512_storeu_si512(static_cast<char*>(to) + sizeof(__m512i), lines[1]);
  }
  INGOT_INLINE void widen(__m512i (&pairs)[2], const void* from) {
    const __m512i codes = TablesAvx512::spread(static_cast<const uint8_t*>(from));
    TablesAvx512::look_up(pairs, kE4m3Bytes, codes, codes);
  }
};

}  // namespace ingot
