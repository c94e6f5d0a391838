// What the KV cache holds, and the way from there to the matrix units. With macros of the engine, or of its heads of a
// size:
//   INGOT_KV        type of the cache; with INGOT_KV_CODES that in which attention multiplies the codes of one
//   INGOT_HEAD_DIM  dims of an attention head
#pragma once

#include "matrix_units.cuh"

using Kv = INGOT_KV;
constexpr int kHeadDim = INGOT_HEAD_DIM;
constexpr int kPaddedDim = (kHeadDim + 15) / 16 * 16;

// What the cache holds. The numbers of a KV head in a block lie together, token after token; behind codes lie the
// scales of these tokens, float32.
#ifdef INGOT_KV_CODES
using Stored = int8_t;
constexpr int kScaleBytes = 4;
#else
using Stored = Kv;
constexpr int kScaleBytes = 0;
#endif
constexpr bool kScaled = kScaleBytes > 0;

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
// Bytes 0 and 1 of a word, or 2 and 3, as bf16: 128 + the lowest seven bits, less 128 or 256 as the sign says.
INGOT_DEVICE uint32_t two_codes(uint32_t word, int second) {
  const uint32_t two = __byte_perm(word, 0, second ? 0x4342 : 0x4140);
  return fused_bf16((two & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (two & 0x007f007fu) | 0x43004300u);
}
struct alignas(8) EightCodes {
  uint32_t words[2];
};
struct alignas(16) EightNumbers {
  uint32_t words[4];
};
// Eight neighbours of the cache to shared memory, as the matrix units take them; zeros unless `valid`.
INGOT_DEVICE void copy_eight(Kv* to, const Stored* from, bool valid) {
  const EightCodes codes = valid ? *reinterpret_cast<const EightCodes*>(from) : EightCodes{{0, 0}};
  *reinterpret_cast<EightNumbers*>(to) = EightNumbers{{two_codes(codes.words[0], 0), two_codes(codes.words[0], 1),
                                                       two_codes(codes.words[1], 0), two_codes(codes.words[1], 1)}};
}
// A number of the cache, without its scale.
INGOT_DEVICE float number_of(Stored code) { return static_cast<float>(code); }
INGOT_DEVICE Kv as_kv(Stored code) { return from_float<Kv>(static_cast<float>(code)); }
#else
INGOT_DEVICE void copy_eight(Kv* to, const Stored* from, bool valid) { copy_async(to, from, valid); }
INGOT_DEVICE float number_of(Stored number) { return to_float(number); }
INGOT_DEVICE Kv as_kv(Stored number) { return number; }
#endif
