// Sixteen float32 lanes in AVX-512 (F, BW, DQ, VL). The interface is described in simd_avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "isa/prefetch.h"

#define INGOT_INLINE [[gnu::always_inline]] static inline

namespace ingot {

struct SimdAvx512 {
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;
  using V = __m512;
  using Mask = __mmask16;

  INGOT_INLINE V zero() { return _mm512_setzero_ps(); }
  INGOT_INLINE V set1(float x) { return _mm512_set1_ps(x); }
  INGOT_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
  INGOT_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  INGOT_INLINE V load_partial(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
  INGOT_INLINE void store_partial(float* p, V v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

  INGOT_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
  INGOT_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  INGOT_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  INGOT_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
  INGOT_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  INGOT_INLINE void accumulate(V& sum, V a, V b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
  INGOT_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }
  INGOT_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
  INGOT_INLINE V sqrt(V a) { return _mm512_sqrt_ps(a); }
  INGOT_INLINE V abs(V a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
  INGOT_INLINE V max_abs(V a, V b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(abs(b))));
  }

  INGOT_INLINE Mask less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  INGOT_INLINE Mask less_equal(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  INGOT_INLINE Mask first_lanes(int64_t n) { return static_cast<Mask>((1u << n) - 1); }
  INGOT_INLINE V select(Mask m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }

  // Upper and lower eight lanes are added first, then as in eight lanes.
  INGOT_INLINE float reduce_add(V v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  INGOT_INLINE float reduce_max(V v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // What the reductions above make of eight vectors, in the first eight lanes.
  INGOT_INLINE V reduce_add(const V (&rows)[8]) {
    return reduce(rows, [](V a, V b) __attribute__((always_inline)) { return _mm512_add_ps(a, b); });
  }
  INGOT_INLINE V reduce_max(const V (&rows)[8]) {
    return reduce(rows, [](V a, V b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
  }

  INGOT_INLINE V add_exponent(V p, V t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
  }

  // The nearest whole number, of two the even one; NaN stays NaN.
  INGOT_INLINE V nearest(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for whole n; NaN stays NaN.
  INGOT_INLINE V scale(V a, V n) { return _mm512_scalef_ps(a, n); }

  INGOT_INLINE V load_bf16(const uint16_t* p) {
    return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  INGOT_INLINE V load_bf16_partial(const uint16_t* p, int64_t n) {
    return from_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  }
  INGOT_INLINE void store_bf16(uint16_t* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
  INGOT_INLINE void store_bf16_partial(uint16_t* p, V v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16(v));
  }

  INGOT_INLINE V load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  INGOT_INLINE void store_i8(int8_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }

  INGOT_INLINE V load_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i words = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
    return _mm512_mul_ps(_mm512_cvtph_ps(words), set1(256.0f));
  }
  INGOT_INLINE void store_e4m3(uint8_t* p, V v) {
    const V size = abs(v);
    const __m512i bits = _mm512_castps_si512(size),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32((127 - 7) << 3));
    const __m512i denormal = _mm512_cvtps_epi32(_mm512_mul_ps(size, set1(0x1p9f)));
    const __m512i code = _mm512_mask_blend_epi32(less(size, set1(0x1p-6f)), normal, denormal);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 24), _mm512_set1_epi32(0x80));
    const __m512i wide = _mm512_or_si512(_mm512_min_epi32(code, _mm512_set1_epi32(0x7E)), sign);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(wide));
  }

  INGOT_INLINE void load_columns(const float* p, int64_t stride, V (&columns)[kWidth]) {
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4, p += 4) {
      const V a = load_fours(p, stride), b = load_fours(p + stride, stride);
      const V c = load_fours(p + 2 * stride, stride), d = load_fours(p + 3 * stride, stride);
      const V ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
      const V ab2 = _mm512_unpackhi_ps(a, b), cd2 = _mm512_unpackhi_ps(c, d);
      columns[i] = _mm512_shuffle_ps(ab, cd, 0x44);
      columns[i + 1] = _mm512_shuffle_ps(ab, cd, 0xEE);
      columns[i + 2] = _mm512_shuffle_ps(ab2, cd2, 0x44);
      columns[i + 3] = _mm512_shuffle_ps(ab2, cd2, 0xEE);
    }
  }

  INGOT_INLINE void load_bf16_pairs(const void* p, V& even, V& odd) {
    const __m512i bits = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  // The inverse, of rounded numbers.
  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const __m512i low = _mm512_srli_epi32(rounded(even), 16);
    const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
    _mm512_storeu_si512(p, _mm512_or_si512(low, high));
  }

  INGOT_INLINE V load_bf16_even(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
  }
  INGOT_INLINE V load_bf16_odd(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }

  INGOT_INLINE void prefetch(const void* p) { asm volatile("prefetcht0 (%0)" : : "r"(p)); }
  INGOT_INLINE void prefetch_far(const void* p) { asm volatile("prefetcht1 (%0)" : : "r"(p)); }
  // What lies ahead in panels that are read once: for L2, and nearer for L1.
  INGOT_INLINE void prefetch_stream(const void* p) {
    prefetch(static_cast<const char*>(p) + 4096);
    prefetch_far(static_cast<const char*>(p) + 16384);
  }
  static constexpr int kReadingRows = 2;
  INGOT_INLINE void prefetch_reading(const void* p) {
    prefetch(static_cast<const char*>(p) + ahead_of_reading(4096));
    prefetch_far(static_cast<const char*>(p) + ahead_of_reading(16384));
  }
  // Where a panel is the only stream that is read.
  INGOT_INLINE void prefetch_one_stream(const void* p) {
    prefetch(static_cast<const char*>(p) + 4096);
    prefetch_far(static_cast<const char*>(p) + ahead_of_reading(16384));
  }

 private:
  INGOT_INLINE V from_bf16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  INGOT_INLINE __m256i to_bf16(V v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(v), 16)); }
  // The high halves are bf16.
  INGOT_INLINE __m512i rounded(V v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
  }
  // A tree: halves of two rows beside each other, then fourths of four, then eighths of eight.
  template <typename F>
  INGOT_INLINE V reduce(const V (&rows)[8], F f) {
    V pairs[4], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      pairs[i] = f(_mm512_shuffle_f32x4(rows[2 * i], rows[2 * i + 1], 0x44),
                   _mm512_shuffle_f32x4(rows[2 * i], rows[2 * i + 1], 0xEE));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      fours[i] = f(_mm512_shuffle_f32x4(pairs[2 * i], pairs[2 * i + 1], 0x88),
                   _mm512_shuffle_f32x4(pairs[2 * i], pairs[2 * i + 1], 0xDD));
    const __m512d first = _mm512_castps_pd(fours[0]), second = _mm512_castps_pd(fours[1]);
    const V all =
        f(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
    return _mm512_permutexvar_ps(order, f(all, _mm512_movehdup_ps(all)));
  }
  // Four elements of rows 0, 4, 8 and 12.
  INGOT_INLINE V load_fours(const float* p, int64_t stride) {
    V v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 4 * stride), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 8 * stride), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(p + 12 * stride), 3);
  }
};

}  // namespace ingot
