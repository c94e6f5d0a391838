// What products of int8 and int4 weights need where AVX2 has the dot product of bytes (AVX-VNNI) and no AVX-512. The
// lines lie as in int8_avx2.h; the sums are those of int8_avx512.h, in two halves of eight columns.
//
// Dots: dot_mixed(sum, bytes, signed_bytes), VPDPBUSD; dot_pairs(sum, a, b), VPDPWSSD. See dots_avxvnni.h and
// dots_avx2.h.
#pragma once

#include <cstring>

#include "isa/int8_avx2.h"

namespace ingot {

template <typename Dots>
struct Int8Dots : Int8Avx2 {
  // Sums of (code - 8) * x in int32, as int8_avx512.h.
  using Short = __m256i;
  static constexpr int64_t kLongestRun = 128;
  static constexpr int kCodePanels = 1, kCodeRows = 6;
  static constexpr bool kLeavesCodes = false;

  template <int kRun>
  INGOT_INLINE int32_t short_start(const int8_t* x) {
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i sums = _mm256_setzero_si256();
    Dots::dot_mixed(sums, ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    if constexpr (kRun == 64) Dots::dot_mixed(sums, ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32)));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    return -8 * _mm_cvtsi128_si32(four);
  }
  INGOT_INLINE Short add_shorts(Short a, Short b) { return _mm256_add_epi32(a, b); }
  INGOT_INLINE void dot(Short& sum, Short codes, Short x) { Dots::dot_mixed(sum, codes, x); }
  INGOT_INLINE Short short_multipliers(const int8_t* m) { return columns(m); }
  INGOT_INLINE void add_short(Short& total, Short sum, Short multipliers) {
    total = _mm256_add_epi32(total, _mm256_mullo_epi32(sum, multipliers));
  }

  static constexpr bool kMultiplies32 = false;
  static constexpr int kUnitRows = 6;
  template <int64_t kBits>
  INGOT_INLINE Short unit_scales(const int8_t* p) {  // as int8_avx512.h, and add_codes too
    return CodeLines<kBits>::kSignedScales ? _mm256_and_si256(columns(p), _mm256_set1_epi32(0xFFFF)) : columns(p);
  }
  template <int64_t kBits, int kPair>
  INGOT_INLINE void add_codes(Short& total, Short& run, Short first, Short x, Short second, Short next_x, Short scales,
                              const int32_t* start) {
    using Codes = CodeLines<kBits>;
    if constexpr (Codes::kSigned && (Codes::kEights || kPair == 0)) {
      int32_t low_half;
      std::memcpy(&low_half, reinterpret_cast<const int16_t*>(start) + kPair, sizeof(low_half));
      run = set_short(low_half);
    } else if constexpr (Codes::kEights || kPair == 0) {
      run = set_short(0);
    }
    Dots::dot_mixed(run, first, x);
    Dots::dot_mixed(run, second, next_x);
    if constexpr (Codes::kEights || kPair == 1) add_pairs(total, run, scales);
  }
  INGOT_INLINE void add_pairs(Short& total, Short a, Short b) { Dots::dot_pairs(total, a, b); }

  // Sums of whole bytes. A mixed product wants one factor unsigned: x gets 128 more, and the sums begin at -128 * (sum
  // of the column's weights); they may wrap on the way.
  struct Weights {
    __m256i half[2];
  };
  static constexpr uint32_t kFlipX = 0x80808080u;
  static constexpr int kByteRows = 6, kBytePanels = 1;
  static constexpr int64_t kBlockRows = 16 * kByteRows, kBlockPanels = 32;

  INGOT_INLINE Sum start_sum(const int32_t* columns) {
    const __m256i zero = _mm256_setzero_si256();
    const Sum sums = load_sum(columns);
    return {{_mm256_sub_epi32(zero, _mm256_slli_epi32(sums.half[0], 7)),
             _mm256_sub_epi32(zero, _mm256_slli_epi32(sums.half[1], 7))}};
  }
  INGOT_INLINE Weights load_weights(const void* p) {
    const auto* from = static_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
  }
  INGOT_INLINE void store_weights(void* p, const Weights& weights) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), weights.half[0]);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, weights.half[1]);
  }
  // A line of codes → the line of its low or of its high nibbles.
  INGOT_INLINE Weights low_weights(const void* codes, const Multipliers& m) {
    return {{times(load_codes(codes, false), m, 0), times(load_codes(second(codes), false), m, 1)}};
  }
  INGOT_INLINE Weights high_weights(const void* codes, const Multipliers& m) {
    return {{times(load_codes(codes, true), m, 0), times(load_codes(second(codes), true), m, 1)}};
  }
  INGOT_INLINE void dot_bytes(Sum& sum, const Weights& weights, __m256i x) {
    Dots::dot_mixed(sum.half[0], x, weights.half[0]);
    Dots::dot_mixed(sum.half[1], x, weights.half[1]);
  }

  // Values of a table, as int8_avx512.h.
  using Table = __m256i;
  static constexpr int32_t kValueBias = 128;
  INGOT_INLINE Table table(const int8_t* values) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  INGOT_INLINE Table product_table(const int8_t* values) {
    return _mm256_xor_si256(table(values), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Weights look_up(const void* codes, Table values) {
    return {{_mm256_shuffle_epi8(values, line_codes<kBits, kQuad>(codes)),
             _mm256_shuffle_epi8(values, line_codes<kBits, kQuad>(second(codes)))}};
  }
  INGOT_INLINE Weights load_values(const void* p) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    const Weights stored = load_weights(p);
    return {{_mm256_xor_si256(stored.half[0], flip), _mm256_xor_si256(stored.half[1], flip)}};
  }
  INGOT_INLINE void dot_values(Sum& sum, const Weights& values, __m256i x) {
    Dots::dot_mixed(sum.half[0], values.half[0], x);
    Dots::dot_mixed(sum.half[1], values.half[1], x);
  }

 private:
  INGOT_INLINE const void* second(const void* codes) { return static_cast<const __m256i*>(codes) + 1; }
};

}  // namespace ingot
