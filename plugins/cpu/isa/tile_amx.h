// The eight tile registers of AMX. Same interface and the same bits in plain C++: tile_emulated.h.
// Tiles 0-3 hold sums (float32 or int32), 4 and 5 rows of x, 6 and 7 a part of a weight panel: 32 k in bf16, 64 in
// int8.
#pragma once

#include <cstdint>

namespace ingot {

// Instructions as asm, not intrinsics: those of GCC 12 do not tell which memory they read.
class TilesAmx {
 public:
  // Tiles of sums and of x have `rows` (1 to 16) rows. The registers belong to this thread until destruction.
  explicit TilesAmx(int64_t rows) {
    Config config;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? static_cast<uint8_t>(rows) : 16;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TilesAmx() { asm volatile("tilerelease" : : : "memory"); }
  TilesAmx(const TilesAmx&) = delete;

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // Rows of 64 bytes that lie one after another.
  template <int kTile>
  void load(const void* p) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(kRowBytes), "i"(kTile) : "memory");
  }
  // The same for data that should not push others out of L1.
  template <int kTile>
  void load_once(const void* p) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(kRowBytes), "i"(kTile) : "memory");
  }
  template <int kTile>
  void store(void* p) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(kRowBytes), "i"(kTile) : "memory");
  }
  // sums += x * weight, 32 k
  template <int kSums, int kX, int kWeight>
  void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kWeight));
  }
  // sums += x * weight, 64 k
  template <int kSums, int kX, int kWeight>
  void dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kWeight));
  }

 private:
  static constexpr int64_t kRowBytes = 64;

  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
};

}  // namespace ingot
