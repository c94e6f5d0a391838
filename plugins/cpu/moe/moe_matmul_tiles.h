// Products of experts on tile registers (AMX), as in matmul_tiles.h: x is rounded to bf16 or int8, a sum takes its k in
// steps of a tile, ascending. One row goes the same way as many, so it gets the same bits.
#pragma once

#include "matmul/matmul_tiles.h"
#include "moe/moe_matmul_int8_kernel.h"
#include "moe/moe_matmul_parts.h"

namespace ingot {
namespace {

template <typename S, typename Tiles, typename Rows, typename Weight>
class TileProduct {
  using Sum = typename Rows::Sum;
  static constexpr int64_t kAtOnce = 4, kSteps = 16, kPartBytes = kSteps * kTileBytes;
  static constexpr int64_t kStoredBytes = kPartBytes / Weight::kTiles;
  using Ring = TileRing<Weight, kAtOnce>;

 public:
  static constexpr int64_t kFewRows = kTileRows, kMaxRows = 8 * kTileRows, kMaxPanels = 16;

  static size_t scratch(const MoeMatmulArgs& args) {
    return kSumBytes + kUnpackedBytes + Rows::bytes(kMaxRows, args.k);
  }

  TileProduct(const MoeMatmulArgs& args, std::byte* memory)
      : weight_(args),
        sums_(reinterpret_cast<Sum*>(memory)),
        unpacked_(memory + kSumBytes),
        rows_(0, args.k, unpacked_ + kUnpackedBytes) {}

  int64_t panel_bytes() const { return weight_.panel_bytes(); }

  void set_rows(const float* const* rows, int64_t count) {
    rows_ = Rows(count, rows_.packed.k, unpacked_ + kUnpackedBytes);
    for (int64_t row = 0; row < packed().padded_rows(); ++row)
      rows_.pack(row, row < count ? rows[row] : nullptr, rows[std::min(row + 1, count - 1)]);
  }

  void multiply(const std::byte* const* panels, int64_t count) {
    Tiles tiles(packed().tile_rows());
    packed().rows <= kTileRows ? stream(tiles, panels, count) : blocked(tiles, panels, count);
    if constexpr (std::is_same_v<Sum, int32_t>) {
      scale_sums<S>(panels, count, packed().rows, sums_, stride(), rows_.scales);
    } else if constexpr (Weight::kScaled) {
      scale_sums<S>(panels, count, packed().rows, sums_, stride(), nullptr);
    }
  }
  const float* sums() const { return reinterpret_cast<const float*>(sums_); }
  int64_t stride() const { return packed().row_tiles() * kTileRows * kPanel; }

 private:
  static constexpr size_t kSumBytes = kMaxPanels * kMaxRows * kPanel * sizeof(Sum);
  static constexpr size_t kUnpackedBytes =
      Weight::kInPlace ? 0 : static_cast<size_t>(std::max<int64_t>(2 * kPartBytes, Ring::kBytes));

  const PackedRows& packed() const { return rows_.packed; }

  // A panel's part as it lies in memory.
  const std::byte* stored(const std::byte* panel, int64_t step) const {
    return panel + weight_.data_offset() + step / Weight::kTiles * kTileBytes;
  }

  // Sums stay in the tiles over the whole K, each weight is read once.
  void stream(Tiles& tiles, const std::byte* const* panels, int64_t count) {
    constexpr int64_t kAheadBytes = 4096;
    for (int64_t p = 0, step; p < count; p += step) {
      step = count - p >= kAtOnce ? kAtOnce : 1;
      const BlockArgs<Sum> part{packed().data, packed().step_bytes(), packed().steps(), sums_ + p * stride(), stride(),
                                true};
      const auto multiply = [&](const auto& source) {
        if (step == 1) {
          block<Rows, 1, 1, false>(tiles, part, source);
        } else {
          block<Rows, 1, kAtOnce, false>(tiles, part, source);
        }
      };
      if constexpr (Weight::kInPlace) {
        const std::byte *data[kAtOnce], *ahead[kAtOnce];
        for (int64_t i = 0; i < step; ++i) {
          data[i] = stored(panels[p + i], 0);
          ahead[i] = data[i] + kAheadBytes;
        }
        multiply(TilesInMemory<S>{data, ahead, kTileBytes / kLineBytes});
      } else {
        const Ring ring{weight_, panels + p, nullptr, ceil_div(packed().steps(), Weight::kTiles), 0, unpacked_};
        ring.start(static_cast<int>(step));
        multiply(ring);
      }
    }
  }

  // Cut along K, so that two panels' part stays in L1; while two panels are used, the next two are read ahead.
  void blocked(Tiles& tiles, const std::byte* const* panels, int64_t count) {
    const int64_t row_tiles = packed().row_tiles(), lines = ceil_div(2 * kTileRows / Weight::kTiles, row_tiles);
    for (int64_t step = 0; step < packed().steps(); step += kSteps) {
      const int64_t steps = std::min(kSteps, packed().steps() - step);
      for (int64_t p = 0; p < count; p += 2) {
        const int64_t pair = std::min<int64_t>(2, count - p);
        const std::byte* data[2];
        for (int64_t i = 0; i < pair; ++i) data[i] = part_of(panels[p + i], i, step, steps);
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const int64_t done = tile / 2 * steps * lines * kLineBytes;  // read ahead by the tiles before
          const std::byte* ahead[2];
          for (int64_t i = 0; i < 2; ++i) {
            const int64_t next = p + pair + i;
            ahead[i] = (next < count ? stored(panels[next], step)
                                     : stored(panels[std::min(i, count - 1)], step) + kStoredBytes) +
                       done;
          }
          const BlockArgs<Sum> part{rows_.packed.tile(tile, step),
                                    packed().step_bytes(),
                                    steps,
                                    sums_ + p * stride() + tile * kTileRows * kPanel,
                                    stride(),
                                    step == 0};
          const TilesInMemory<S> source{data, ahead, lines};
          const bool two = tile + 1 < row_tiles;
          (two         ? pair == 2 ? block<Rows, 2, 2, true, Tiles, TilesInMemory<S>>
                                   : block<Rows, 2, 1, true, Tiles, TilesInMemory<S>>
           : pair == 2 ? block<Rows, 1, 2, true, Tiles, TilesInMemory<S>>
                       : block<Rows, 1, 1, true, Tiles, TilesInMemory<S>>)(tiles, part, source);
        }
      }
    }
  }

  // The tiles of some steps of a panel, the first or second of a pair.
  const std::byte* part_of(const std::byte* panel, int64_t which, int64_t step, int64_t steps) const {
    if constexpr (Weight::kInPlace) {
      return stored(panel, step);
    } else {
      std::byte* to = unpacked_ + which * kPartBytes;
      for (int64_t s = 0; s < steps; s += Weight::kTiles)
        weight_.unpack(panel, (step + s) / Weight::kTiles, to + s * kTileBytes,
                       stored(panel, step + s + 2 * Weight::kTiles));
      return to;
    }
  }

  Weight weight_;
  Sum* sums_;
  std::byte* unpacked_;
  Rows rows_;
};

template <typename S, typename Tiles>
using Bf16TileProduct = TileProduct<S, Tiles, Bf16Rows<S>, Bf16Tiles>;

template <typename S, typename Tiles, typename Format>
using NarrowedTileProduct = TileProduct<S, Tiles, Bf16Rows<S>, NarrowedTiles<S, Format>>;

template <typename S, typename Tiles, typename Format>
using Int8TileProduct = TileProduct<S, Tiles, Int8Rows<S>, Int8Tiles<S, Format>>;

// int4: the fewest rows go the way of machines without tiles, as in matmul_int8_tiles.
template <typename S, typename Tiles, int64_t kRun>
using CodeOrTileProduct = FewOrMany<kFewRows, CodeProduct<FewRows<S>, kRun>, Int8TileProduct<S, Tiles, W4>>;

}  // namespace
}  // namespace ingot
