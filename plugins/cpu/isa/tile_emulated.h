// The tile registers of tile_amx.h in plain C++, bit for bit.
#pragma once

#include <xmmintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ingot {

class TilesEmulated {
 public:
  explicit TilesEmulated(int64_t rows) : rows_(rows) {}
  TilesEmulated(const TilesEmulated&) = delete;

  template <int kTile>
  void zero() {
    std::memset(tile_[kTile], 0, sizeof(tile_[kTile]));
  }
  template <int kTile>
  void load(const void* p) {
    std::memcpy(tile_[kTile], p, static_cast<size_t>(kTile < 6 ? rows_ : 16) * kRowBytes);
  }
  template <int kTile>
  void load_once(const void* p) {
    load<kTile>(p);
  }
  template <int kTile>
  void store(void* p) {
    std::memcpy(p, tile_[kTile], static_cast<size_t>(rows_) * kRowBytes);
  }

  // TDPBF16PS: for each sum, even and odd k are summed apart by fma from zero, then to each other, then to the sum.
  // Always round to nearest even; denormal numbers count as zero going in and come out as zero.
  template <int kSums, int kX, int kWeight>
  void dot_bf16() {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(0x1F80 | 0x8040);  // masked exceptions, flush to zero, denormals are zero
    asm volatile("" : : : "memory");
    for (int64_t m = 0; m < rows_; ++m) {
      float part[2][16] = {};
      for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half)
          for (int n = 0; n < 16; ++n)
            part[half][n] = std::fma(value(kX, m, k, half), value(kWeight, k, n, half), part[half][n]);
      for (int n = 0; n < 16; ++n) {
        const float sum = std::bit_cast<float>(tile_[kSums][m][n]) + (part[0][n] + part[1][n]);
        tile_[kSums][m][n] = std::bit_cast<uint32_t>(sum);
      }
    }
    asm volatile("" : : : "memory");
    _mm_setcsr(control);
  }

  // TDPBSSD: signed bytes, sums modulo 2^32.
  template <int kSums, int kX, int kWeight>
  void dot_int8() {
    for (int64_t m = 0; m < rows_; ++m)
      for (int k = 0; k < 16; ++k)
        for (int byte = 0; byte < 4; ++byte) {
          const int32_t x = signed_byte(tile_[kX][m][k], byte);
          for (int n = 0; n < 16; ++n)
            tile_[kSums][m][n] += static_cast<uint32_t>(x * signed_byte(tile_[kWeight][k][n], byte));
        }
  }

 private:
  static constexpr size_t kRowBytes = 64;

  // The bf16 number in the low (0) or high (1) half of an element.
  float value(int tile, int64_t row, int64_t column, int half) const {
    const uint32_t pair = tile_[tile][row][column];
    return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xFFFF0000u);
  }

  static int32_t signed_byte(uint32_t four, int byte) { return static_cast<int8_t>(four >> (8 * byte)); }

  int64_t rows_;
  uint32_t tile_[8][16][16];
};

}  // namespace ingot
