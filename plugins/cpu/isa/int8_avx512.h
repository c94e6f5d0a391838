// What products of int8 and int4 weights need beside float32 lanes, in AVX-512 with VNNI; explained in int8_avx2.h.
#pragma once

#include <cstring>

#include "isa/code_lines.h"
#include "isa/simd_avx512.h"

namespace ingot {

struct Int8Avx512 : SimdAvx512 {
  // Products of up to so many rows read codes as one stream. Of those that read in order, a third row takes longer than
  // memory does.
  static constexpr int kStreamedRows = 4, kRowsInOrder = 2;
  static int64_t streamed_rows() { return reads_in_order() ? kRowsInOrder : kStreamedRows; }
  // Where codes without scales of groups are the only stream that is read.
  INGOT_INLINE void prefetch_in_order(const void* p) {
    prefetch(static_cast<const char*>(p) + ahead_in_order(4096));
    prefetch_far(static_cast<const char*>(p) + ahead_of_reading(16384));
  }
  // What lies ahead in codes that few rows read once. A Zen 5 reads codes faster if it is asked for L2, since work on
  // them leaves it less room to look ahead.
  INGOT_INLINE void prefetch_codes_once(const void* p, int64_t beside) {
    prefetch(static_cast<const char*>(p) + ahead_of_reading(4096));
    prefetch_beside_codes(p, beside);
  }
  // beside: the bytes of scales that the codes before p have had. They shift what L2 is asked for, by one more line now
  // and then: else each panel would have as many bytes of codes that it was never asked for.
  INGOT_INLINE void prefetch_beside_codes(const void* p, int64_t beside) {
    prefetch_far(static_cast<const char*>(p) + ahead_in_order(16384 + beside));
  }
  // Likewise where several panels are read at once: what is read after this one lies elsewhere.
  INGOT_INLINE void prefetch_streams(const void* p, const void* next) {
    prefetch(static_cast<const char*>(p) + 2048);
    prefetch_far(next);
  }

  // For low nibbles, and for high ones, which stay in their place: the upper half of their products is what the lower
  // half would be.
  struct Multipliers {
    __m512i low_size, low_flip, high_size, high_flip, zero;
  };
  INGOT_INLINE Multipliers multipliers(const int8_t* m) {
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(m)));
    const __m512i four_times = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(0x01010101));
    const __m512i bytes = _mm512_shuffle_epi8(all, four_times), size = _mm512_abs_epi8(bytes);
    const __m512i high_flip = _mm512_and_si512(bytes, high_nibbles()), low_flip = _mm512_srli_epi16(high_flip, 4);
    const __m512i zero = _mm512_sub_epi8(_mm512_slli_epi16(size, 3), _mm512_and_si512(size, low_flip));
    return {_mm512_and_si512(size, _mm512_set1_epi16(0xFF)), low_flip, _mm512_slli_epi16(size, 12), high_flip, zero};
  }

  INGOT_INLINE void prefetch_codes(const void* p) { prefetch_far(p); }  // what is multiplied has L1

  INGOT_INLINE void unpack(const void* codes, const Multipliers& low, const Multipliers& high, void* to_low,
                           void* to_high) {
    store_weights(to_low, low_weights(codes, low));
    store_weights(to_high, high_weights(codes, high));
  }

  template <int kByte>
  INGOT_INLINE V load_quads(const void* p) {
    __m512i bytes = _mm512_loadu_si512(p);
    if constexpr (kByte < 3) bytes = _mm512_slli_epi32(bytes, 24 - 8 * kByte);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 24));
  }
  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_castps_si512(odd)));
  }

  INGOT_INLINE V load_int(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
  INGOT_INLINE void store_i8_line(int8_t* p, const V (&v)[4]) {
    const __m512i first = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
    const __m512i second = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
    const __m512i quads = _mm512_packs_epi16(first, second);  // first ones of each vector, then second ones ..
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, quads));
  }
  INGOT_INLINE V load_i8_partial(const int8_t* p, int64_t n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
  }

  // Sums of (code - 8) * x over 32, 64 or 128 k, in int32: a code is unsigned, as VPDPBUSD wants it, so that nothing
  // need be unpacked. They begin at -8 * (sum of x).
  using Short = __m512i;
  static constexpr int64_t kLongestRun = 128;
  template <int64_t kRun>
  static constexpr int64_t kMaxCodeRows = kRun == 32 ? 28 : 64;  // see matmul_w4a8
  static constexpr int kCodePanels = 2, kCodeRows = 8;           // more would keep totals in memory
  static constexpr bool kLeavesCodes = false;
  static constexpr int kGroupRows = 6;  // sums and totals of two panels: 24 registers

  template <int kRun>
  INGOT_INLINE int32_t short_start(const int8_t* x) {
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i sums =
        _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    if constexpr (kRun == 64)
      sums = _mm256_dpbusd_epi32(sums, ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32)));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    return -8 * _mm_cvtsi128_si32(four);
  }
  INGOT_INLINE Short set_short(int32_t start) { return _mm512_set1_epi32(start); }
  INGOT_INLINE Short add_shorts(Short a, Short b) { return _mm512_add_epi32(a, b); }
  INGOT_INLINE Short load_codes(const void* p, bool high) {
    const __m512i both = _mm512_loadu_si512(p);
    return _mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
  }
  INGOT_INLINE Short short_multipliers(const int8_t* m) { return columns(m); }
  INGOT_INLINE void add_short(Short& total, Short sum, Short multipliers) {
    total = _mm512_add_epi32(total, _mm512_mullo_epi32(sum, multipliers));
  }
  INGOT_INLINE Short load_short(const int32_t* p) { return _mm512_loadu_si512(p); }
  INGOT_INLINE void store_short(int32_t* p, Short sum) { _mm512_storeu_si512(p, sum); }

  // Codes that are numbers, times x and times scales that are whole numbers: sums over 16 k join `total` in int32.
  static constexpr bool kMultiplies32 = true;  // where the CPU is quick at it (cpu_isa.h)
  static constexpr int kUnitRows = 6;          // their totals and the codes of two panels: 20 registers
  // Line kQuad of those that lines of low bits and one of upper bits make.
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Short line_codes(const void* p) {
    using Codes = CodeLines<kBits>;
    constexpr int kRight = kQuad % Codes::kLowQuads * Codes::kLow, kLeft = Codes::kLow - kQuad * Codes::kUpper;
    const auto* line = static_cast<const char*>(p);
    const __m512i low = _mm512_loadu_si512(line + kQuad / Codes::kLowQuads * 64);
    const __m512i codes =
        _mm512_and_si512(kRight > 0 ? _mm512_srli_epi16(low, kRight) : low, _mm512_set1_epi8((1 << Codes::kLow) - 1));
    if constexpr (Codes::kUpper == 0) return codes;
    const __m512i upper = _mm512_loadu_si512(line + Codes::kLowLines * 64);
    const __m512i moved = kLeft > 0 ? _mm512_slli_epi16(upper, kLeft) : _mm512_srli_epi16(upper, -kLeft);
    const __m512i mask = _mm512_set1_epi8(((1 << Codes::kUpper) - 1) << Codes::kLow);
    return _mm512_ternarylogic_epi32(moved, mask, codes, 0xEA);  // (a & b) | c
  }
  // The upper half of a scale is zero: it multiplies the upper half of a sum.
  template <int64_t kBits>
  INGOT_INLINE Short unit_scales(const int8_t* p) {
    return CodeLines<kBits>::kSignedScales ? _mm512_and_si512(columns(p), _mm512_set1_epi32(0xFFFF)) : columns(p);
  }
  // Pair kPair of the four lines of 16 k. Sums of codes of up to four bits fit 16 bits for two pairs, others for one.
  // start: int16, what the sums of the first and second pair begin at where codes stand for signed numbers.
  template <int64_t kBits, int kPair>
  INGOT_INLINE void add_codes(Short& total, Short& run, Short first, Short x, Short second, Short next_x, Short scales,
                              const int32_t* start) {
    using Codes = CodeLines<kBits>;
    if constexpr (Codes::kSigned && (Codes::kEights || kPair == 0)) {
      int32_t low_half;  // the upper half is anything
      std::memcpy(&low_half, reinterpret_cast<const int16_t*>(start) + kPair, sizeof(low_half));
      run = set_short(low_half);
    } else if constexpr (Codes::kEights || kPair == 0) {
      run = set_short(0);
    }
    dot(run, first, x);
    dot(run, second, next_x);
    if constexpr (Codes::kEights || kPair == 1) add_pairs(total, run, scales);
  }
  // 64 x → their sums, eight by eight.
  INGOT_INLINE void sum_eights(const int8_t* x, int16_t (&sums)[8]) {
    const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(x), _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m128i raised = _mm512_cvtepi64_epi16(_mm512_sad_epu8(bytes, _mm512_setzero_si512()));  // by 128 for each
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm_sub_epi16(raised, _mm_set1_epi16(8 * 128)));
  }
  // Pairs of 16 bits: whole numbers of two groups times sums of x.
  INGOT_INLINE Short pairs(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  INGOT_INLINE void add_pairs(Short& total, Short a, Short b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a), "v"(b));
  }
  INGOT_INLINE Short sum_pairs(Short pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
  // Sums of two groups as such a pair. The first one moves to the upper half. The second one begins below it, 2^15
  // higher than it is, so that it takes nothing from the upper half.
  static constexpr int32_t kSecondStart = 1 << 15;
  INGOT_INLINE Short begin_second(Short first, Short start) { return add_shorts(_mm512_slli_epi32(first, 16), start); }
  INGOT_INLINE Short end_second(Short both) { return _mm512_xor_si512(both, set_short(kSecondStart)); }
  INGOT_INLINE Short scale_pairs(const int8_t* first, const int8_t* second) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, columns(second), _mm512_slli_epi32(columns(first), 16));
  }
  INGOT_INLINE V short_floats(Short sum) { return _mm512_cvtepi32_ps(sum); }

  // For products on tiles: (code - kBias) * scale of less than 14 bits as 128 * upper + lower, signed bytes.
  INGOT_INLINE Short wide_scales(const int8_t* p) {
    const __m512i wide = columns(p);
    return _mm512_mask_blend_epi16(0xAAAAAAAA, wide, _mm512_slli_epi32(wide, 16));
  }
  template <int16_t kBias>
  INGOT_INLINE void split(Short codes, Short scales, Short& lower, Short& upper) {
    const __m512i bias = _mm512_set1_epi16(kBias), half = _mm512_set1_epi16(64);
    const __m512i even = _mm512_sub_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0xFF)), bias);
    const __m512i odd = _mm512_sub_epi16(_mm512_srli_epi16(codes, 8), bias);
    const __m512i products[2] = {_mm512_mullo_epi16(even, scales), _mm512_mullo_epi16(odd, scales)};
    __m512i high[2], low[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      high[i] = _mm512_srai_epi16(_mm512_add_epi16(products[i], half), 7);
      low[i] = _mm512_sub_epi16(products[i], _mm512_slli_epi16(high[i], 7));
    }
    lower = _mm512_mask_blend_epi8(kOddBytes, low[0], _mm512_slli_epi16(low[1], 8));
    upper = _mm512_mask_blend_epi8(kOddBytes, high[0], _mm512_slli_epi16(high[1], 8));
  }
  INGOT_INLINE Short unsplit(Short lower, Short upper) { return _mm512_add_epi32(lower, _mm512_slli_epi32(upper, 7)); }

  // Sums in int32, a lane per column. VPDPBUSD wants one operand unsigned: x gets 128 more, and the sums begin at -128
  // * (sum of the column's weights); they may wrap on the way.
  using Sum = __m512i;
  static constexpr uint32_t kFlipX = 0x80808080u;
  static constexpr int kByteRows = 14, kBytePanels = 2;
  static constexpr int64_t kBlockRows = 19 * kByteRows, kBlockPanels = 32;  // a part of x and its sums: 1 MiB of L2
  using Weights = Sum;

  INGOT_INLINE Sum start_sum(const int32_t* columns) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(load_sum(columns), 7));
  }
  INGOT_INLINE Sum load_sum(const int32_t* p) { return _mm512_loadu_si512(p); }
  INGOT_INLINE void store_sum(int32_t* p, Sum sum) { _mm512_storeu_si512(p, sum); }
  INGOT_INLINE Sum load_x(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  // A line of codes → the line of its low or of its high nibbles.
  INGOT_INLINE Weights low_weights(const void* codes, const Multipliers& m) {
    const __m512i code =
        _mm512_ternarylogic_epi32(_mm512_loadu_si512(codes), low_nibbles(), m.low_flip, 0x6A);  // (a & b) ^ c
    return _mm512_sub_epi8(_mm512_mullo_epi16(code, m.low_size), m.zero);
  }
  INGOT_INLINE Weights high_weights(const void* codes, const Multipliers& m) {
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_loadu_si512(codes), high_nibbles(), m.high_flip, 0x6A);
    return _mm512_sub_epi8(_mm512_mulhi_epu16(code, m.high_size), m.zero);
  }
  INGOT_INLINE Weights load_weights(const void* p) { return _mm512_loadu_si512(p); }
  INGOT_INLINE void store_weights(void* p, Weights w) { _mm512_storeu_si512(p, w); }
  INGOT_INLINE void dot(Sum& sum, Sum bytes, Sum signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));  // asm: see accumulate in simd_avx2.h
  }
  INGOT_INLINE void dot_bytes(Sum& sum, Sum weights, Sum x) { dot(sum, x, weights); }

  // Values of a table, which codes of four bits stand for. Products take them with 128 more, unsigned; sums begin at
  // -kValueBias * (sum of x).
  using Table = __m512i;
  static constexpr int32_t kValueBias = 128;
  INGOT_INLINE Table table(const int8_t* values) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  INGOT_INLINE Table product_table(const int8_t* values) {
    return _mm512_xor_si512(table(values), _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Weights look_up(const void* codes, Table values) {
    return _mm512_shuffle_epi8(values, line_codes<kBits, kQuad>(codes));
  }
  INGOT_INLINE Weights load_values(const void* p) {
    return _mm512_xor_si512(load_weights(p), _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  INGOT_INLINE void dot_values(Sum& sum, Weights values, Sum x) { dot(sum, values, x); }
  // A whole number for each column → a line of bytes.
  INGOT_INLINE Weights spread_bytes(V numbers) {
    const __m128i first = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    return _mm512_shuffle_epi8(_mm512_cvtps_epi32(numbers), _mm512_broadcast_i32x4(first));
  }
  INGOT_INLINE Weights sub_bytes(Weights a, Weights b) { return _mm512_sub_epi8(a, b); }
  INGOT_INLINE Sum set_sum(int32_t start) { return _mm512_set1_epi32(start); }
  template <int kVector>
  INGOT_INLINE V sum_floats(Sum sum) {
    return _mm512_cvtepi32_ps(sum);
  }
  INGOT_INLINE V load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  INGOT_INLINE V load_f8(const void* p, bool second) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    const __m512i words = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<int16_t>(0xBFFF)));
    return _mm512_cvtph_ps(second ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words));
  }

 private:
  static constexpr uint64_t kOddBytes = 0xAAAAAAAAAAAAAAAAu;

  INGOT_INLINE __m512i columns(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  INGOT_INLINE __m512i low_nibbles() { return _mm512_set1_epi8(0x0F); }
  INGOT_INLINE __m512i high_nibbles() { return _mm512_set1_epi8(static_cast<char>(0xF0)); }
};

}  // namespace ingot
