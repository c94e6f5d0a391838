// What the KV cache holds, and the way from there to the matrix units. With macros of the engine, or of its heads of a
// size:
//   INGOT_KV        type of the cache; with INGOT_KV_CODES that in which attention multiplies the codes of one
//   INGOT_KV_CODES  where the cache has codes, which: Int8Codes or Fp8Codes
//   INGOT_HEAD_DIM  dims of an attention head
#pragma once

#include "matrix_units.cuh"

using Kv = INGOT_KV;
constexpr int kHeadDim = INGOT_HEAD_DIM;
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;

#ifdef INGOT_KV_CODES
// Codes of a token's key or value in one head. kLargest: the number that the largest magnitude becomes. kUnit: by which
// the numbers that matrix units take are too small, a power of two: queries and weights are larger by it.
struct Int8Codes {
  using Stored = int8_t;
  static constexpr float kLargest = 127.f, kUnit = 64.f;

  INGOT_DEVICE static uint32_t code(float x) { return static_cast<int>(rintf(x)) & 0xff; }
  INGOT_DEVICE static float number(Stored code) { return static_cast<float>(code); }
  // Two bytes of a word as bf16, divided by kUnit: a code and 128, as the lowest bits of a bf16, are so many times
  // 2^-133.
  static constexpr uint32_t kFirst = 0x4140, kSecond = 0x4342;  // bytes 0 and 1, or 2 and 3
  INGOT_DEVICE static uint32_t two(uint32_t word, uint32_t which) {
    return fused_bf16(__byte_perm(word ^ 0x80808080u, 0, which), 0x7f007f00u, 0xc000c000u);  // * 2^127 - 2
  }
  // Bytes 0 and 2 of a word, or 1 and 3, likewise.
  INGOT_DEVICE static uint32_t two_apart(uint32_t word, int odd) { return two(word, odd ? 0x4341 : 0x4240); }
};

// E4M3: sign, four bits of exponent (bias 7), three bits of fraction. Its exponent and fraction, at the place of those
// of a wider type, are its number times a power of two, also where it is denormal.
struct Fp8Codes {
  using Stored = uint8_t;
  static constexpr float kLargest = 448.f, kUnit = 1.f;

  // The nearest number, ties to even. x: not NaN.
  INGOT_DEVICE static uint32_t code(float x) {
    constexpr uint32_t kLargestCode = 0x7e, kBias = (127 - 7) << 3;
    const uint32_t bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const float magnitude = __uint_as_float(size);
    const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - kBias;
    const uint32_t found = magnitude < 0x1p-6f ? static_cast<uint32_t>(rintf(magnitude * 0x1p9f)) : normal;
    return (found < kLargestCode ? found : kLargestCode) | (bits >> 24 & 0x80u);
  }
  INGOT_DEVICE static float number(Stored code) {
    return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;
  }
  // Two bytes of a word as bf16.
  static constexpr uint32_t kFirst = 0x1404, kSecond = 0x3424;  // bytes 0 and 1, or 2 and 3, to upper bytes
  INGOT_DEVICE static uint32_t two(uint32_t word, uint32_t which) { return upper(__byte_perm(word, 0, which)); }
  // Bytes 0 and 2 of a word, or 1 and 3.
  INGOT_DEVICE static uint32_t two_apart(uint32_t word, int odd) { return upper(odd ? word : word << 8); }
  // The upper bytes of both halves: what their sign makes of 2^120 multiplies the rest.
  INGOT_DEVICE static uint32_t upper(uint32_t pair) {
    return fused_bf16(pair >> 4 & 0x07f007f0u, (pair & 0x80008000u) | 0x7b807b80u, 0x80008000u);
  }
};

using Codes = INGOT_KV_CODES;
using Stored = Codes::Stored;
constexpr int kScaleBytes = 4;
#else
using Stored = Kv;
constexpr int kScaleBytes = 0;
#endif
// The numbers of a KV head in a block lie together, token after token; behind codes lie the scales of these tokens,
// float32.
constexpr bool kScaled = kScaleBytes > 0;
// Whether attention brings codes to shared memory as they are, ahead of their tile: a row of them is whole 16 bytes,
// and so is what lies before it, as a block has a multiple of 16 tokens. Larger heads have no room for that.
constexpr bool kCodesAhead = kScaled && kHeadDim % 16 == 0 && kHeadDim <= 256;

// A token of a KV head in a pool has the number (block * kv_heads + kv_head) * kTokens + its place in the block.
template <int kDim, int kTokens>
struct Slots {
  INGOT_DEVICE static int64_t head(int64_t slot) { return slot / kTokens * kTokens * (kDim + kScaleBytes); }
  INGOT_DEVICE static int64_t row(int64_t slot) {
    if constexpr (kScaled) return head(slot) + slot % kTokens * kDim;
    return slot * kDim;
  }
  // Where its scale lies, in bytes.
  INGOT_DEVICE static int64_t scale(int64_t slot) { return head(slot) + kTokens * kDim + slot % kTokens * kScaleBytes; }
};

#ifdef INGOT_KV_CODES
struct alignas(8) EightCodes {
  uint32_t words[2];
};
struct alignas(16) SixteenCodes {
  uint32_t words[4];
};
struct alignas(16) EightNumbers {
  uint32_t words[4];
};
INGOT_DEVICE EightNumbers eight_numbers(uint32_t low, uint32_t high) {
  return {{Codes::two(low, Codes::kFirst), Codes::two(low, Codes::kSecond), Codes::two(high, Codes::kFirst),
           Codes::two(high, Codes::kSecond)}};
}
// Eight neighbours of the cache to shared memory, as the matrix units take them; zeros unless `valid`.
INGOT_DEVICE void copy_eight(Kv* to, const Stored* from, bool valid) {
  const EightCodes codes = valid ? *reinterpret_cast<const EightCodes*>(from) : EightCodes{{0, 0}};
  *reinterpret_cast<EightNumbers*>(to) = eight_numbers(codes.words[0], codes.words[1]);
}
constexpr float kCodeUnit = Codes::kUnit;
// A number of the cache, without its scale.
constexpr float kLargestCode = Codes::kLargest;
INGOT_DEVICE uint32_t code_of(float x) { return Codes::code(x); }
INGOT_DEVICE float number_of(Stored code) { return Codes::number(code); }
INGOT_DEVICE Kv as_kv(Stored code) { return from_float<Kv>(Codes::number(code) / kCodeUnit); }
#else
INGOT_DEVICE void copy_eight(Kv* to, const Stored* from, bool valid) { copy_async(to, from, valid); }
constexpr float kCodeUnit = 1.f;
constexpr float kLargestCode = 1.f;  // there are none
INGOT_DEVICE uint32_t code_of(float) { return 0; }
INGOT_DEVICE float number_of(Stored number) { return to_float(number); }
INGOT_DEVICE Kv as_kv(Stored number) { return number; }
#endif
