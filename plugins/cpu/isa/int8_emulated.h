// int8_avx512.h in plain C++, with the same bits.
#pragma once

#include <numeric>

#include "isa/code_lines.h"
#include "isa/simd_emulated.h"

namespace ingot {

struct Int8Emulated : SimdEmulated {
  struct Multipliers {
    const int8_t* m;
  };
  INGOT_INLINE Multipliers multipliers(const int8_t* m) { return {m}; }

  INGOT_INLINE void prefetch_codes(const void* p) { prefetch(p); }

  INGOT_INLINE void unpack(const void* codes, const Multipliers& low, const Multipliers& high, void* to_low,
                           void* to_high) {
    store_weights(to_low, low_weights(codes, low));
    store_weights(to_high, high_weights(codes, high));
  }

  template <int kByte>
  INGOT_INLINE V load_quads(const void* p) {
    return {__builtin_convertvector((load_sum(static_cast<const int32_t*>(p)) << (24 - 8 * kByte)) >> 24, Floats)};
  }
  INGOT_INLINE void store_bf16_pairs(void* p, V even, V odd) {
    const Words bits = (std::bit_cast<Words>(even) >> 16) | (std::bit_cast<Words>(odd) & 0xFFFF0000u);
    std::memcpy(p, &bits, sizeof(bits));
  }

  INGOT_INLINE V load_int(const int32_t* p) { return {__builtin_convertvector(load_sum(p), Floats)}; }
  INGOT_INLINE void store_i8_line(int8_t* p, const V (&v)[4]) {
    for (int i = 0; i < 4; ++i) store_i8(p + i * kWidth, v[i]);
  }
  INGOT_INLINE V load_i8_partial(const int8_t* p, int64_t n) {
    V v = zero();
    for (int i = 0; i < n; ++i) v.lane[i] = p[i];
    return v;
  }

  using Short = Ints;
  static constexpr int64_t kLongestRun = 128;
  template <int64_t kRun>
  static constexpr int64_t kMaxCodeRows = kRun == 32 ? 7 : 10;
  static constexpr int kCodePanels = 2, kCodeRows = 3;
  static constexpr bool kLeavesCodes = false;

  template <int kRun>
  INGOT_INLINE int32_t short_start(const int8_t* x) {
    int32_t sum = 0;
    for (int i = 0; i < kRun; ++i) sum += x[i];
    return -8 * sum;
  }
  INGOT_INLINE Short set_short(int32_t start) { return Short{} + start; }
  INGOT_INLINE Short add_shorts(Short a, Short b) { return a + b; }
  INGOT_INLINE Short load_codes(const void* p, bool high) {
    return (load_sum(static_cast<const int32_t*>(p)) >> (high ? 4 : 0)) & 0x0F0F0F0F;
  }
  INGOT_INLINE Short short_multipliers(const int8_t* m) {
    Short all;
    for (int i = 0; i < kWidth; ++i) all[i] = m[i];
    return all;
  }
  INGOT_INLINE void add_short(Short& total, Short sum, Short multipliers) { total += sum * multipliers; }
  INGOT_INLINE Short load_short(const int32_t* p) { return load_sum(p); }
  INGOT_INLINE void store_short(int32_t* p, Short sum) { store_sum(p, sum); }

  static constexpr bool kMultiplies32 = false;
  static constexpr int kUnitRows = 3;
  // Number `index` of the fields of so many bits in each byte.
  template <int kCount>
  INGOT_INLINE Words fields(const std::byte* line, int index) {
    return std::bit_cast<Words>(load_weights(line)) >> (index * kCount) & (0x01010101u * ((1u << kCount) - 1));
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Short line_codes(const void* p) {
    using Codes = CodeLines<kBits>;
    const auto* line = static_cast<const std::byte*>(p);
    Words codes = fields<Codes::kLow>(line + kQuad / Codes::kLowQuads * 64, kQuad % Codes::kLowQuads);
    if constexpr (Codes::kUpper > 0) codes |= fields<Codes::kUpper>(line + Codes::kLowLines * 64, kQuad) << Codes::kLow;
    return std::bit_cast<Short>(codes);
  }
  template <int64_t>
  INGOT_INLINE Short unit_scales(const int8_t* p) {
    return short_multipliers(p);
  }
  template <int64_t kBits, int kPair>
  INGOT_INLINE void add_codes(Short& total, Short& run, Short first, Short x, Short second, Short next_x, Short scales,
                              const int32_t* start) {
    run = set_short(CodeLines<kBits>::kSigned ? reinterpret_cast<const int16_t*>(start)[kPair] : 0);
    dot(run, first, x);
    dot(run, second, next_x);
    total += run * scales;
  }
  INGOT_INLINE void sum_eights(const int8_t* x, int16_t (&sums)[8]) {
    for (int i = 0; i < 8; ++i) sums[i] = static_cast<int16_t>(std::accumulate(x + 8 * i, x + 8 * i + 8, 0));
  }
  INGOT_INLINE Short pairs(const int8_t* p) {
    Short all;
    for (int i = 0; i < kWidth; ++i)
      all[i] = static_cast<int32_t>(static_cast<uint32_t>(p[2 * i + 1]) << 16 | (p[2 * i] & 0xFFFFu));
    return all;
  }
  INGOT_INLINE void add_pairs(Short& total, Short a, Short b) {
    total += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
  }
  INGOT_INLINE V short_floats(Short sum) { return {__builtin_convertvector(sum, Floats)}; }

  INGOT_INLINE Short wide_scales(const int8_t* p) { return short_multipliers(p); }
  template <int16_t kBias>
  INGOT_INLINE void split(Short codes, Short scales, Short& lower, Short& upper) {
    int8_t bytes[4 * kWidth], high[4 * kWidth];
    std::memcpy(bytes, &codes, sizeof(bytes));
    for (int i = 0; i < 4 * kWidth; ++i) {
      const int product = (bytes[i] - kBias) * scales[i / 4];
      high[i] = static_cast<int8_t>((product + 64) >> 7);
      bytes[i] = static_cast<int8_t>(product - high[i] * 128);
    }
    std::memcpy(&lower, bytes, sizeof(bytes));
    std::memcpy(&upper, high, sizeof(high));
  }
  INGOT_INLINE Short unsplit(Short lower, Short upper) { return lower + (upper << 7); }

  using Sum = Ints;
  static constexpr uint32_t kFlipX = 0x80808080u;
  static constexpr int kByteRows = 5, kBytePanels = 2;
  static constexpr int64_t kBlockRows = 8 * kByteRows, kBlockPanels = 8;  // tests meet several blocks
  using Weights = Sum;

  INGOT_INLINE Sum load_sum(const int32_t* p) {
    Sum sum;
    std::memcpy(&sum, p, sizeof(sum));
    return sum;
  }
  INGOT_INLINE void store_sum(int32_t* p, Sum sum) { std::memcpy(p, &sum, sizeof(sum)); }
  INGOT_INLINE Sum load_x(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return Sum{} + four;
  }
  INGOT_INLINE Sum start_sum(const int32_t* columns) {
    return std::bit_cast<Sum>(Words{} - (std::bit_cast<Words>(load_sum(columns)) << 7));
  }
  INGOT_INLINE Weights low_weights(const void* codes, const Multipliers& m) {
    return times(load_codes(codes, false), m);
  }
  INGOT_INLINE Weights high_weights(const void* codes, const Multipliers& m) {
    return times(load_codes(codes, true), m);
  }
  INGOT_INLINE Weights load_weights(const void* p) { return load_sum(static_cast<const int32_t*>(p)); }
  INGOT_INLINE void store_weights(void* p, Weights w) { std::memcpy(p, &w, sizeof(w)); }
  // VPDPBUSD: unsigned bytes and signed ones, the sum of four products modulo 2^32.
  INGOT_INLINE void dot(Sum& sum, Sum bytes, Sum signed_bytes) {
    Words total = std::bit_cast<Words>(sum);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Words byte = (std::bit_cast<Words>(bytes) >> (8 * i)) & 0xFFu;
      total += byte * std::bit_cast<Words>((signed_bytes << (24 - 8 * i)) >> 24);
    }
    sum = std::bit_cast<Sum>(total);
  }
  INGOT_INLINE void dot_bytes(Sum& sum, Sum weights, Sum x) { dot(sum, x, weights); }

  struct Table {
    int8_t values[16];
  };
  static constexpr int32_t kValueBias = 128;
  INGOT_INLINE Table table(const int8_t* values) {
    Table all;
    std::memcpy(&all, values, sizeof(all));
    return all;
  }
  INGOT_INLINE Table product_table(const int8_t* values) {
    Table all = table(values);
    for (int8_t& value : all.values) value = static_cast<int8_t>(value ^ 0x80);
    return all;
  }
  template <int64_t kBits, int kQuad>
  INGOT_INLINE Weights look_up(const void* codes, const Table& table) {
    const Short found = line_codes<kBits, kQuad>(codes);
    int8_t bytes[4 * kWidth];
    std::memcpy(bytes, &found, sizeof(bytes));
    for (int8_t& byte : bytes) byte = table.values[byte];
    return load_weights(bytes);
  }
  INGOT_INLINE Weights load_values(const void* p) {
    return std::bit_cast<Sum>(std::bit_cast<Words>(load_weights(p)) ^ 0x80808080u);
  }
  INGOT_INLINE void dot_values(Sum& sum, Weights values, Sum x) { dot(sum, values, x); }
  INGOT_INLINE Sum set_sum(int32_t start) { return Sum{} + start; }
  template <int kVector>
  INGOT_INLINE V sum_floats(Sum sum) {
    return {__builtin_convertvector(sum, Floats)};
  }
  INGOT_INLINE V load_f8(const void* p, bool second) {
    uint16_t words[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      const unsigned byte = static_cast<const uint8_t*>(p)[i + (second ? kWidth : 0)];
      words[i] = static_cast<uint16_t>((byte & 0x80) << 8 | (byte & 0x7F) << 7);
    }
    return load_f16(words);
  }

 private:
  INGOT_INLINE Weights times(Short codes, const Multipliers& m) {
    int8_t bytes[4 * kWidth];
    std::memcpy(bytes, &codes, sizeof(bytes));
    for (int i = 0; i < 4 * kWidth; ++i) bytes[i] = static_cast<int8_t>((bytes[i] - 8) * m.m[i / 4]);
    return load_weights(bytes);
  }
};

}  // namespace ingot
