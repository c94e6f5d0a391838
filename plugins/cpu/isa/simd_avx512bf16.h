// Sixteen float32 sums in AVX-512 that are fed by the CPU's dot product of bf16: each 32-bit element of a factor is a
// pair of bf16 numbers. Everything else is AVX-512's.
#pragma once

#include "isa/code_lines.h"
#include "isa/int8_avx512.h"

namespace ingot {

struct PairsAvx512 : SimdAvx512 {
  // A line takes one instruction for each row, which leaves memory nothing to wait for. One stream of lines, asked for
  // L1 some way ahead, is read faster than by the CPU's own prefetching, and up to kWorkingRows faster than several at
  // once. From five rows on, a Zen 4 is faster if it is asked for L2 too.
  static constexpr int kReadingRows = 4, kWorkingRows = 12;
  INGOT_INLINE void prefetch_reading(const void* p) { prefetch_one_stream(p); }
  INGOT_INLINE void prefetch_stream(const void* p) {
    prefetch(static_cast<const char*>(p) + 4096);
    prefetch_far(static_cast<const char*>(p) + ahead_of_work(16384));
  }

  // VDPBF16PS: the odd number of each pair by one fma, then the even one. Always rounds to nearest even; denormal
  // numbers count as zero going in and come out as zero, whatever MXCSR says.
  INGOT_INLINE void accumulate(V& sum, V a, V b) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
  // The same of a pair in memory, which the instruction broadcasts.
  INGOT_INLINE void accumulate_from(V& sum, const float& a, V b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(a));
  }

  // 32 numbers, first[0] in the even half of pair 0, first[1] in its odd half. Denormal numbers become zero.
  INGOT_INLINE V round_pairs(V first, V second) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(second, first);
    return reinterpret_cast<const V&>(pairs);
  }
  // Pairs of whole numbers: first in the even halves, second in the odd ones. The low halves of their floats are zero.
  INGOT_INLINE V load_i8_pairs(const int8_t* first, const int8_t* second) {
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(load_i8(first)), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_castps_si512(load_i8(second))));
  }
  INGOT_INLINE V load_e4m3_pairs(const uint8_t* first, const uint8_t* second) {
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(load_e4m3(first)), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_castps_si512(load_e4m3(second))));
  }
  // Two lines of 16 pairs from 64 codes, four of each column one after another. kRows: that multiply them.
  template <int kRows>
  INGOT_INLINE void load_i8_quads(V (&to)[2], const int8_t* codes) {
    quads_of_bytes(to, _mm512_loadu_si512(codes));
  }
  // Of all int8, -128 too.
  INGOT_INLINE void load_byte_quads(V (&to)[2], const int8_t* codes) { quads_of_bytes(to, _mm512_loadu_si512(codes)); }
  // The bytes of bf16 of 16 whole numbers.
  struct ValueTable {
    __m512i lower, upper;
  };
  INGOT_INLINE ValueTable value_table(const int8_t* values) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)));
    return {_mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 16))),
            _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 24)))};
  }
  // Line kQuad of the codes that share lines (code_lines.h): values of a table, or the numbers that they stand for.
  template <int64_t kBits, int kQuad>
  INGOT_INLINE void load_value_quads(V (&to)[2], const void* lines, const ValueTable& values) {
    look_up(to, values, Int8Avx512::line_codes<kBits, kQuad>(lines));
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE void load_code_quads(V (&to)[2], const void* lines) {
    const __m512i codes = Int8Avx512::line_codes<kBits, kQuad>(lines);
    quads_of_bytes(to, _mm512_sub_epi8(codes, _mm512_set1_epi8(CodeLines<kBits>::kBias)));
  }
  INGOT_INLINE V load_f16(const uint16_t* p) { return Int8Avx512::load_f16(p); }
  // Line kLine of pairs from a block of bf16c: a line of codes of upper bytes, low nibbles for two lines, high ones for
  // the next two; then, for each two, a line of lower bytes, of which each 16 are of eight numbers of the one and of
  // eight of the other.
  struct UpperBytes {
    __m512i table;
  };
  INGOT_INLINE UpperBytes upper_bytes(const void* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
  }
  template <int kLine>
  INGOT_INLINE V restored_pairs(const void* block, UpperBytes upper) {
    const auto* lines = static_cast<const __m512i*>(block);
    __m512i codes = _mm512_loadu_si512(lines);
    if constexpr (kLine / 2 == 1) codes = _mm512_srli_epi16(codes, 4);
    const __m512i high = _mm512_shuffle_epi8(upper.table, _mm512_and_si512(codes, _mm512_set1_epi8(0x0F)));
    const __m512i low = _mm512_loadu_si512(lines + 1 + kLine / 2);
    return _mm512_castsi512_ps(kLine % 2 == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
  }
  // Those bits of every pair.
  INGOT_INLINE V keep_bits(V pairs, uint32_t bits) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(static_cast<int>(bits))));
  }

 protected:
  // Of each four columns of codes, the first pairs of all, then the second ones.
  INGOT_INLINE __m512i in_pairs(__m512i quads) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm512_shuffle_epi8(quads, _mm512_broadcast_i32x4(order));
  }
  INGOT_INLINE void quads_of_bytes(V (&to)[2], __m512i quads) {
    const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    const auto number = [&](int left) __attribute__((always_inline)) {
      const __m512i moved = left > 0 ? _mm512_slli_epi32(quads, left) : quads;
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(moved, 24)));
    };
    to[0] = _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_srli_epi32(number(24), 16), _mm512_and_si512(number(16), upper_half)));
    to[1] =
        _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(number(8), 16), _mm512_and_si512(number(0), upper_half)));
  }
  INGOT_INLINE void look_up(V (&to)[2], const ValueTable& values, __m512i quads) {
    const __m512i codes = in_pairs(quads);
    interleave(to, _mm512_shuffle_epi8(values.lower, codes), _mm512_shuffle_epi8(values.upper, codes));
  }
  INGOT_INLINE void interleave(V (&to)[2], __m512i lower, __m512i upper) {
    to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lower, upper));
    to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lower, upper));
  }
};

}  // namespace ingot
