#include <immintrin.h>

#include "checksum/crc32.h"

// A reflected message block times x^n modulo the polynomial: constants are bit-reversed x^(n +- 32), shifted by one.
namespace {

__m128i fold(__m128i block, __m128i by, const uint8_t* next) {
  const __m128i low = _mm_clmulepi64_si128(block, by, 0x00), high = _mm_clmulepi64_si128(block, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
}

}  // namespace

void ingot::crc32_fold_pclmul(uint32_t state, const uint8_t* data, size_t bytes, uint8_t folded[16]) {
  const __m128i by_512 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);  // n = 512 bits: four blocks ahead
  const __m128i by_128 = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);  // n = 128 bits: one block ahead
  __m128i block[4];
  for (int i = 0; i < 4; ++i) block[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i));
  block[0] = _mm_xor_si128(block[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64)
    for (int i = 0; i < 4; ++i) block[i] = fold(block[i], by_512, data + 16 * i);
  for (int i = 1; i < 4; ++i) {
    uint8_t next[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(next), block[i]);
    block[i] = fold(block[i - 1], by_128, next);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(folded), block[3]);
}
