// Eight float32 lanes in AVX2. Same interface: simd_avx512.h and simd_emulated.h (16 lanes). Kernel templates take one
// of these structs; per lane all three give the same bits.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/prefetch.h"

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct SimdAvx2 {
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;
  using V = __m256;
  using Mask = __m256;  // all bits of a lane set or clear

  INGOT_INLINE V zero() { return _mm256_setzero_ps(); }
  INGOT_INLINE V set1(float x) { return _mm256_set1_ps(x); }
  INGOT_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
  INGOT_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }

  // The first n lanes (0 <= n <= kWidth); other lanes load as zero and nothing beyond is touched.
  INGOT_INLINE V load_partial(const float* p, int64_t n) { return _mm256_maskload_ps(p, tail_mask(n)); }
  INGOT_INLINE void store_partial(float* p, V v, int64_t n) { _mm256_maskstore_ps(p, tail_mask(n), v); }

  INGOT_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
  INGOT_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  INGOT_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  INGOT_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
  INGOT_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c
  // sum = a * b + sum; asm, because GCC 12 lets sums of long loops wander between registers and spills them
  INGOT_INLINE void accumulate(V& sum, V a, V b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
  INGOT_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }  // a > b ? a : b, so b where one is NaN
  INGOT_INLINE V min(V a, V b) { return _mm256_min_ps(a, b); }  // a < b ? a : b
  INGOT_INLINE V sqrt(V a) { return _mm256_sqrt_ps(a); }
  INGOT_INLINE V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  // The larger of a, which has no sign, and |b|, compared as integers: infinity is above all numbers, NaN above
  // infinity.
  INGOT_INLINE V max_abs(V a, V b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(abs(b))));
  }

  INGOT_INLINE Mask less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  INGOT_INLINE Mask less_equal(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
  INGOT_INLINE Mask first_lanes(int64_t n) { return _mm256_castsi256_ps(tail_mask(n)); }
  INGOT_INLINE V select(Mask m, V yes, V no) { return _mm256_blendv_ps(no, yes, m); }

  // Halves are added lane by lane until one is left: ((0+4)+(2+6)) + ((1+5)+(3+7)).
  INGOT_INLINE float reduce_add(V v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  INGOT_INLINE float reduce_max(V v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // p * 2^n for p in [0.5, 2), where t = 1.5 * 2^23 + n holds n in its low bits.
  INGOT_INLINE V add_exponent(V p, V t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
  }

  INGOT_INLINE V load_bf16(const uint16_t* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  INGOT_INLINE V load_bf16_partial(const uint16_t* p, int64_t n) {
    alignas(16) uint16_t lanes[kWidth] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
    return load_bf16(lanes);
  }
  // Rounds to nearest even; a NaN stays a quiet NaN.
  INGOT_INLINE void store_bf16(uint16_t* p, V v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(v)); }
  INGOT_INLINE void store_bf16_partial(uint16_t* p, V v, int64_t n) {
    alignas(16) uint16_t lanes[kWidth];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), to_bf16(v));
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
  }

  INGOT_INLINE V load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // Integers from -127 to 127, rounded to nearest even.
  INGOT_INLINE void store_i8(int8_t* p, V v) {
    const __m256i wide = _mm256_cvtps_epi32(v);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
  }

  // FP8 (E4M3): with another exponent, the same bits as float16. NaN becomes a number.
  INGOT_INLINE V load_e4m3(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i words = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xBFFF)));
    return _mm256_mul_ps(_mm256_cvtph_ps(words), set1(256.0f));
  }
  // Rounded to nearest even; what is larger becomes the largest.
  INGOT_INLINE void store_e4m3(uint8_t* p, V v) {
    const V size = abs(v);
    const __m256i bits = _mm256_castps_si256(size),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd);
    const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32((127 - 7) << 3));
    const __m256i denormal = _mm256_cvtps_epi32(_mm256_mul_ps(size, set1(0x1p9f)));
    const __m256i code = _mm256_blendv_epi8(normal, denormal, _mm256_castps_si256(less(size, set1(0x1p-6f))));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
    const __m256i wide = _mm256_or_si256(_mm256_min_epi32(code, _mm256_set1_epi32(0x7E)), sign);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
  }

  // Element i of kWidth rows to columns[i].
  INGOT_INLINE void load_columns(const float* p, int64_t stride, V (&columns)[kWidth]) {
#pragma GCC unroll 2
    for (int i = 0; i < kWidth; i += 4, p += 4) {
      const V a = load_fours(p, stride), b = load_fours(p + stride, stride);
      const V c = load_fours(p + 2 * stride, stride), d = load_fours(p + 3 * stride, stride);
      const V ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
      const V ab2 = _mm256_unpackhi_ps(a, b), cd2 = _mm256_unpackhi_ps(c, d);
      columns[i] = _mm256_shuffle_ps(ab, cd, 0x44);
      columns[i + 1] = _mm256_shuffle_ps(ab, cd, 0xEE);
      columns[i + 2] = _mm256_shuffle_ps(ab2, cd2, 0x44);
      columns[i + 3] = _mm256_shuffle_ps(ab2, cd2, 0xEE);
    }
  }

  // kWidth pairs of bf16 (a row of panel16.bf16 is 16 pairs): low halves are the even k, high halves the odd k.
  INGOT_INLINE void load_bf16_pairs(const void* p, V& even, V& odd) {
    const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  // The inverse, of rounded numbers.
  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const __m256i low = _mm256_srli_epi32(rounded(even), 16);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_blend_epi16(low, rounded(odd), 0xAA));
  }

  // One half of such a line.
  INGOT_INLINE V load_bf16_even(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
  }
  // asm, so that the mask stays in memory: loops that call this have no register left for it
  INGOT_INLINE V load_bf16_odd(const uint16_t* p) {
    V v;
    asm("vandps %2, %1, %0" : "=x"(v) : "x"(_mm256_loadu_ps(reinterpret_cast<const float*>(p))), "m"(kHighHalves));
    return v;
  }

  // asm, because GCC 12 drops _mm_prefetch in loops of unknown length
  INGOT_INLINE void prefetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
  // Of what is used only after more than L1 holds.
  INGOT_INLINE void prefetch_far(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
  // What lies ahead in panels that are read once, at two distances: of one alone, memory has too little to do.
  INGOT_INLINE void prefetch_stream(const void* p) {
    asm volatile("prefetcht1 (%0)" : : "r"(static_cast<const char*>(p) + 16384));
    prefetch(static_cast<const char*>(p) + 2048);
  }
  // The same for products of so few rows that memory sets their pace.
  static constexpr int kReadingRows = 1;
  INGOT_INLINE void prefetch_reading(const void* p) {
    asm volatile("prefetcht1 (%0)" : : "r"(static_cast<const char*>(p) + ahead_of_reading(16384)));
    prefetch(static_cast<const char*>(p) + ahead_of_reading(2048));
  }

 private:
  struct alignas(32) Words {
    uint32_t word[8];
  };
  static constexpr uint32_t kHigh = 0xFFFF0000u;
  static constexpr Words kHighHalves = {{kHigh, kHigh, kHigh, kHigh, kHigh, kHigh, kHigh, kHigh}};

  INGOT_INLINE __m256i tail_mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  INGOT_INLINE __m128i to_bf16(V v) {
    const __m256i wide = _mm256_srli_epi32(rounded(v), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  }
  // The high halves are bf16.
  INGOT_INLINE __m256i rounded(V v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  }
  // Four elements of rows 0 and 4.
  INGOT_INLINE V load_fours(const float* p, int64_t stride) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * stride), 1);
  }
};

}  // namespace ingot
