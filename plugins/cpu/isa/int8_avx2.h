// What products of int8 and int4 weights need beside float32 lanes, in AVX2. Same interface: int8_avx512.h and
// int8_emulated.h, except for the inner product (see dot below and there).
#pragma once

#include "isa/code_lines.h"
#include "isa/simd_avx2.h"

namespace ingot {

struct Int8Avx2 : SimdAvx2 {
  // |m| of 16 columns in int16, and what turns a code c into (c - 8) * m: ((c ^ flip) * |m|) - zero, byte by byte.
  // A negative m takes 15 - c, so that products stay within 0..225 and no byte borrows from its neighbour.
  struct Multipliers {
    __m256i size[2], flip[2], zero[2];
  };
  INGOT_INLINE Multipliers multipliers(const int8_t* m) {
    Multipliers all;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i wide = columns(m + i * kWidth), bytes = _mm256_shuffle_epi8(wide, each_byte());
      const __m256i size = _mm256_abs_epi8(bytes);
      const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), bytes);
      all.size[i] = _mm256_and_si256(size, _mm256_set1_epi16(0x00FF));
      all.flip[i] = _mm256_and_si256(negative, _mm256_set1_epi8(15));
      const __m256i eight = _mm256_and_si256(_mm256_slli_epi16(size, 3), _mm256_set1_epi8(static_cast<char>(0xF8)));
      all.zero[i] = _mm256_sub_epi8(eight, _mm256_and_si256(negative, size));
    }
    return all;
  }

  // As int8_avx512.h, with the distances of simd_avx2.h.
  INGOT_INLINE void prefetch_codes_once(const void* p, int64_t beside) {
    prefetch(static_cast<const char*>(p) + ahead_of_reading(2048));
    prefetch_beside_codes(p, beside);
  }
  INGOT_INLINE void prefetch_beside_codes(const void* p, int64_t beside) {
    asm volatile("prefetcht1 (%0)" : : "r"(static_cast<const char*>(p) + ahead_of_reading(16384 + beside)));
  }

  INGOT_INLINE void prefetch_codes(const void* p) { prefetch(p); }

  // One line of codes (64 bytes) → the int8 lines of its low and of its high nibbles.
  INGOT_INLINE void unpack(const void* codes, const Multipliers& low, const Multipliers& high, void* to_low,
                           void* to_high) {
    const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i both = _mm256_loadu_si256(static_cast<const __m256i*>(codes) + i);
      const __m256i a = _mm256_and_si256(both, mask), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
      _mm256_storeu_si256(static_cast<__m256i*>(to_low) + i, times(a, low, i));
      _mm256_storeu_si256(static_cast<__m256i*>(to_high) + i, times(b, high, i));
    }
  }

  // Byte kByte of each of kWidth groups of four, widened.
  template <int kByte>
  INGOT_INLINE V load_quads(const void* p) {
    __m256i bytes = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    if constexpr (kByte < 3) bytes = _mm256_slli_epi32(bytes, 24 - 8 * kByte);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 24));
  }
  // Inverse of load_bf16_pairs for numbers that bf16 holds.
  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_blend_epi16(low, _mm256_castps_si256(odd), 0xAA));
  }

  INGOT_INLINE V load_int(const int32_t* p) {
    return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // 64 numbers, as store_i8.
  INGOT_INLINE void store_i8_line(int8_t* p, const V (&v)[8]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const V* four = v + half * 4;
      const __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32(four[0]), _mm256_cvtps_epi32(four[1]));
      const __m256i second = _mm256_packs_epi32(_mm256_cvtps_epi32(four[2]), _mm256_cvtps_epi32(four[3]));
      const __m256i quads = _mm256_packs_epi16(first, second);  // lower ones of each vector, then upper ones
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + half, _mm256_permutevar8x32_epi32(quads, order));
    }
  }
  INGOT_INLINE V load_i8_partial(const int8_t* p, int64_t n) {
    int8_t lanes[kWidth] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_i8(lanes);
  }

  // Sums of (code - 8) * x for up to 64 k, in int16: each lane of 32 bits, a column, has one for the first and one for
  // the last two bytes of its groups of four k. Products of a pair are at most 2 * 15 * 127; the sums begin at
  // -8 * (sum of x), so that at the end they are within 32 * 8 * 127 < 2^15; on the way they may wrap.
  using Short = __m256i;
  static constexpr int64_t kLongestRun = 64;
  template <int64_t>
  static constexpr int64_t kMaxCodeRows = INT64_MAX;    // any number of rows multiplies int4 as it is stored
  static constexpr int kCodePanels = 1, kCodeRows = 5;  // six would take every register, and run slower
  static constexpr bool kLeavesCodes = true;            // see CodeProducts

  // The beginning for a run of 32 or 64 values of x, the same for all columns.
  template <int kRun>
  INGOT_INLINE int32_t short_start(const int8_t* x) {
    const __m256i one = _mm256_set1_epi8(1);
    __m256i sums = _mm256_maddubs_epi16(one, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    if constexpr (kRun == 64) {
      const __m256i more = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32));
      sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(one, more));
    }
    __m128i four = _mm_add_epi16(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtsi128_si32(_mm_mullo_epi16(four, _mm_set1_epi16(-8)));
  }
  INGOT_INLINE Short set_short(int32_t pair) { return _mm256_set1_epi32(pair); }
  INGOT_INLINE Short load_x(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  INGOT_INLINE Short load_codes(const void* p, bool high) {
    const __m256i both = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
  }
  INGOT_INLINE void dot(Short& sum, Short codes, Short x) {  // asm: see accumulate in simd_avx2.h
    Short product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(codes), "x"(x));
  }
  // Both vectors of a line. A Zen 3 makes more of them in this order than one after the other.
  INGOT_INLINE void dots(Short (&sum)[2], const Short (&codes)[2], Short x) {
    Short a, b;
    asm("vpmaddubsw %6, %4, %2\n\tvpmaddubsw %6, %5, %3\n\tvpaddw %2, %0, %0\n\tvpaddw %3, %1, %1"
        : "+x"(sum[0]), "+x"(sum[1]), "=&x"(a), "=&x"(b)
        : "x"(codes[0]), "x"(codes[1]), "x"(x));
  }
  INGOT_INLINE Short short_multipliers(const int8_t* m) {
    const __m256i wide = columns(m);
    return _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xAA);
  }
  INGOT_INLINE void add_short(Short& total, Short sum, Short multipliers) {
    total = _mm256_add_epi32(total, _mm256_madd_epi16(sum, multipliers));
  }
  // Totals, in int32.
  INGOT_INLINE Short load_short(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  INGOT_INLINE void store_short(int32_t* p, Short sum) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), sum); }

  // Codes that are numbers, times x and times scales that are whole numbers: sums over 16 k join `total` in int32.
  static constexpr bool kMultiplies32 = false;
  static constexpr int kUnitRows = 5;
  // Line kQuad of those that lines of low bits and one of upper bits make.
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Short line_codes(const void* p) {
    using Codes = CodeLines<kBits>;
    constexpr int kRight = kQuad % Codes::kLowQuads * Codes::kLow, kLeft = Codes::kLow - kQuad * Codes::kUpper;
    const auto* line = static_cast<const char*>(p);
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + kQuad / Codes::kLowQuads * 64));
    const __m256i codes =
        _mm256_and_si256(kRight > 0 ? _mm256_srli_epi16(low, kRight) : low, _mm256_set1_epi8((1 << Codes::kLow) - 1));
    if constexpr (Codes::kUpper == 0) return codes;
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + Codes::kLowLines * 64));
    const __m256i moved = kLeft > 0 ? _mm256_slli_epi16(upper, kLeft) : _mm256_srli_epi16(upper, -kLeft);
    const __m256i mask = _mm256_set1_epi8(((1 << Codes::kUpper) - 1) << Codes::kLow);
    return _mm256_or_si256(codes, _mm256_and_si256(moved, mask));
  }
  template <int64_t>
  INGOT_INLINE Short unit_scales(const int8_t* p) {
    return short_multipliers(p);
  }
  // Pair kPair of the four lines of 16 k. Sums of two k, which are int16, fit for both pairs, of codes of six bits for
  // one. start: as int8_avx512.h, but of both pairs at once.
  template <int64_t kBits, int kPair>
  INGOT_INLINE void add_codes(Short& total, Short& run, Short first, Short x, Short second, Short next_x, Short scales,
                              const int32_t* start) {
    Short pairs, more;
    asm("vpmaddubsw %3, %2, %0\n\tvpmaddubsw %5, %4, %1\n\tvpaddw %1, %0, %0"
        : "=&x"(pairs), "=&x"(more)
        : "x"(first), "x"(x), "x"(second), "x"(next_x));
    run = kBits == 6 || kPair == 0 ? pairs : _mm256_add_epi16(run, pairs);
    if constexpr (CodeLines<kBits>::kSigned && kPair == 0) add_pairs(total, set_short(*start), scales);
    if constexpr (kBits == 6 || kPair == 1) add_pairs(total, run, scales);
  }
  // 64 x → their sums, eight by eight.
  INGOT_INLINE void sum_eights(const int8_t* x, int16_t (&sums)[8]) {
    const auto* from = reinterpret_cast<const __m256i*>(x);
    for (int i = 0; i < 2; ++i) {
      const __m256i bytes = _mm256_xor_si256(_mm256_loadu_si256(from + i), _mm256_set1_epi8(static_cast<char>(0x80)));
      alignas(32) uint64_t raised[4];  // by 128 for each
      _mm256_store_si256(reinterpret_cast<__m256i*>(raised), _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
      for (int j = 0; j < 4; ++j) sums[4 * i + j] = static_cast<int16_t>(static_cast<int64_t>(raised[j]) - 8 * 128);
    }
  }
  // Pairs of 16 bits: whole numbers of two groups times sums of x.
  INGOT_INLINE Short pairs(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  INGOT_INLINE void add_pairs(Short& total, Short a, Short b) {
    total = _mm256_add_epi32(total, _mm256_madd_epi16(a, b));
  }
  INGOT_INLINE V short_floats(Short sum) { return _mm256_cvtepi32_ps(sum); }

  // Sums of products of whole bytes in int32: the size of a weight (at most 128) times x (at most 127) of its sign. Two
  // such products stay below 2^15.
  struct Sum {
    __m256i half[2];
  };
  struct Weights {
    __m256i line[2], size[2];
  };
  INGOT_INLINE Sum start_sum(const int32_t*) { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
  INGOT_INLINE Sum load_sum(const int32_t* p) {
    const auto* from = reinterpret_cast<const __m256i*>(p);
    return {{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
  }
  INGOT_INLINE void store_sum(int32_t* p, const Sum& sum) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), sum.half[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, sum.half[1]);
  }
  INGOT_INLINE Weights load_weights(const void* p) {
    const __m256i low = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    const __m256i high = _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1);
    return {{low, high}, {_mm256_abs_epi8(low), _mm256_abs_epi8(high)}};
  }
  INGOT_INLINE void dot_bytes(Sum& sum, const Weights& weights, __m256i x) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m256i pairs;
      asm("vpsignb %2, %3, %0\n\tvpmaddubsw %0, %1, %0"
          : "=&x"(pairs)
          : "x"(weights.size[i]), "x"(weights.line[i]), "x"(x));
      sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
  INGOT_INLINE void store_weights(void* p, const Weights& weights) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), weights.line[0]);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, weights.line[1]);
  }
  static constexpr uint32_t kFlipX = 0;  // x and weights are signed
  static constexpr int kByteRows = 5, kBytePanels = 1;
  static constexpr int64_t kBlockRows = 19 * kByteRows, kBlockPanels = 32;

  // Values of a table, which codes of four bits stand for, and their sizes.
  struct Table {
    __m256i values, sizes;
  };
  static constexpr int32_t kValueBias = 0;
  INGOT_INLINE Table table(const int8_t* values) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    return {both, _mm256_abs_epi8(both)};
  }
  INGOT_INLINE Table product_table(const int8_t* values) { return table(values); }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Weights look_up(const void* codes, const Table& table) {
    Weights found;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i code = line_codes<kBits, kQuad>(static_cast<const __m256i*>(codes) + i);
      found.line[i] = _mm256_shuffle_epi8(table.values, code);
      found.size[i] = _mm256_shuffle_epi8(table.sizes, code);
    }
    return found;
  }
  INGOT_INLINE Weights load_values(const void* p) { return load_weights(p); }
  INGOT_INLINE void dot_values(Sum& sum, const Weights& values, __m256i x) { dot_bytes(sum, values, x); }
  INGOT_INLINE Sum set_sum(int32_t start) { return {{_mm256_set1_epi32(start), _mm256_set1_epi32(start)}}; }
  template <int kVector>
  INGOT_INLINE V sum_floats(const Sum& sum) {
    return _mm256_cvtepi32_ps(sum.half[kVector]);
  }
  INGOT_INLINE V load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The first or second kWidth of 2 * kWidth numbers of FP8 (E4M3), over kF8Unit: with another exponent, the same bits
  // as float16. NaN becomes a number.
  INGOT_INLINE V load_f8(const void* p, bool second) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m256i words = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
    return _mm256_cvtph_ps(second ? _mm256_extracti128_si256(words, 1) : _mm256_castsi256_si128(words));
  }

 protected:
  INGOT_INLINE __m256i columns(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // Copies the lowest byte of each lane of 32 bits to all four.
  INGOT_INLINE __m256i each_byte() {
    return _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C, 0, 0x04040404, 0x08080808, 0x0C0C0C0C);
  }
  INGOT_INLINE __m256i times(__m256i codes, const Multipliers& m, int i) {
    return _mm256_sub_epi8(_mm256_mullo_epi16(_mm256_xor_si256(codes, m.flip[i]), m.size[i]), m.zero[i]);
  }
};

}  // namespace ingot
