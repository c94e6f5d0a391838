// bf16 in 12 bits (bf16c), see plugins/compressed.py: the upper byte of a number is one of sixteen that its panel
// lists. The few numbers with other upper bytes are patches, put in their places after a tile is restored. Restored
// lines are those of a bf16 panel, bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "matmul/matmul_parts.h"

namespace ingot {
namespace {

struct Bf16c {
  static constexpr int64_t kTileK = kCompressed.tile_k, kTileBytes = kCompressed.tile_bytes;
  static constexpr int64_t kBlockBytes = 3 * kLineBytes;  // of eight k: codes of upper bytes, two lines of lower ones
  static constexpr int64_t kBlocks = kTileK / 8;
  static constexpr int64_t kNumbers = kTileK * kPanel;
  static_assert(kTileBytes == kBlocks * kBlockBytes);

  explicit Bf16c(int64_t k)
      : tiles_(kCompressed.tiles(k)),
        counts_offset_(kCompressed.counts_offset(k)),
        most_patches_((counts_offset_ - kCompressed.table_bytes) / 4),
        data_offset_(kCompressed.header_bytes(k)),
        panel_bytes_(kCompressed.panel_bytes(k)) {}
  int64_t panel_bytes() const { return panel_bytes_; }
  const std::byte* stored(const std::byte* panel, int64_t tile) const {
    return panel + data_offset_ + tile * kTileBytes;
  }

  // Asks for what `patched` and `patch` read of tiles from `tile` on.
  template <typename S>
  void prefetch_header(const std::byte* panel, int64_t tile) const {
    S::prefetch(panel);
    S::prefetch(panel + counts_offset_ + 2 * tile);
  }

  // Looks for patches from the tile at `from` on. Returns where the first tile with patches begins. If no tile has any,
  // returns where the last tile ends.
  const std::byte* patched(const std::byte* panel, const std::byte* from) const {
    int64_t tile = tile_at(panel, from);
    const auto before = [panel, this](int64_t each) {
      uint16_t count;
      std::memcpy(&count, panel + counts_offset_ + 2 * each, sizeof(count));
      return count;
    };
    if (tile < tiles_)
      for (const uint16_t none = before(tile); tile < tiles_ && before(tile + 1) == none;) ++tile;
    return stored(panel, tile);
  }

  // Puts the patches of the tile at `from` into its restored lines. Stays within the tile and the panel, whatever these
  // say.
  void patch(const std::byte* panel, const std::byte* from, void* to) const {
    uint16_t range[2];
    std::memcpy(range, panel + counts_offset_ + 2 * tile_at(panel, from), sizeof(range));
    for (int64_t i = range[0]; i < std::min<int64_t>(range[1], most_patches_); ++i) {
      uint16_t each[2];  // a number and its place
      std::memcpy(each, panel + kCompressed.table_bytes + 4 * i, sizeof(each));
      std::memcpy(static_cast<std::byte*>(to) + each[1] % kNumbers * 2, each, sizeof(each[0]));
    }
  }

 private:
  int64_t tile_at(const std::byte* panel, const std::byte* from) const {
    return (from - panel - data_offset_) / kTileBytes;
  }

  int64_t tiles_, counts_offset_, most_patches_, data_offset_, panel_bytes_;
};

}  // namespace
}  // namespace ingot
