#include "isa/tile_amx.h"
#include "measure/peak_flops.h"

namespace ingot {
namespace {

constexpr int kSteps = 4;               // of four tiles of 1 KiB
constexpr int64_t kProducts = 16 * 16;  // sums of a tile

// 2 x 2 tiles of sums; kInt8: 64 k a step, else 32.
template <bool kInt8>
void peak_tiles(const PeakData& data, std::byte* sums, int64_t rounds) {
  static_assert(kSteps * 4096 <= sizeof(data.bytes) && sizeof(data.bytes) == sizeof(data.halves));
  const std::byte* const begin =
      reinterpret_cast<const std::byte*>(kInt8 ? static_cast<const void*>(data.bytes) : data.halves);
  TilesAmx tiles(16);
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  const auto dot = [&tiles]<int kSums, int kX, int kWeight>() {
    if constexpr (kInt8)
      tiles.dot_int8<kSums, kX, kWeight>();
    else
      tiles.dot_bf16<kSums, kX, kWeight>();
  };
  for (int64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
      const std::byte* const at = begin + step * 4096;
      tiles.load<4>(at), tiles.load<5>(at + 1024), tiles.load<6>(at + 2048), tiles.load<7>(at + 3072);
      dot.template operator()<0, 4, 6>();
      dot.template operator()<1, 4, 7>();
      dot.template operator()<2, 5, 6>();
      dot.template operator()<3, 5, 7>();
    }
  }
  tiles.store<0>(sums), tiles.store<1>(sums + 1024), tiles.store<2>(sums + 2048), tiles.store<3>(sums + 3072);
}

}  // namespace

const PeakLoop kPeakBf16Amx{"bf16.amx", 2 * kSteps * 4 * kProducts * 32, peak_tiles<false>};
const PeakLoop kPeakInt8Amx{"int8.amx", 2 * kSteps * 4 * kProducts * 64, peak_tiles<true>};

}  // namespace ingot
