// Products of experts on tile registers (AMX), as in matmul_tiles.h: x is rounded to bf16, a sum takes its k in steps
// of 32, ascending. One row goes the same way as many, so it gets the same bits.
#pragma once

#include "matmul_tiles.h"
#include "moe_matmul_parts.h"

namespace ingot {
namespace {

template <typename S, typename Tiles>
class TileProduct {
  using Rows = Bf16Rows<S>;
  static constexpr int64_t kStepK = Rows::kStepK, kSteps = 16, kPartBytes = kSteps * kTileBytes;

 public:
  static constexpr int64_t kFewRows = kTileRows, kMaxRows = 8 * kTileRows, kMaxPanels = 16;

  static int64_t panel_bytes(int64_t k) { return ceil_div(k, kStepK) * kTileBytes; }
  static size_t scratch(int64_t k) {
    return static_cast<size_t>(PackedRows{kMaxRows, k, kStepK, nullptr}.bytes()) + kMaxPanels * kMaxRows * kPanel * sizeof(float);
  }

  TileProduct(std::byte* memory, int64_t k)
      : packed_{0, k, kStepK, memory + kMaxPanels * kMaxRows * kPanel * sizeof(float)},
        sums_(reinterpret_cast<float*>(memory)) {}

  void set_rows(const float* const* rows, int64_t count) {
    packed_.rows = count;
    for (int64_t tile = 0; tile < packed_.row_tiles(); ++tile)
      for (int64_t step = 0; step < packed_.steps(); ++step) {
        auto* to = reinterpret_cast<uint16_t*>(packed_.tile(tile, step));
        for (int64_t r = 0; r < packed_.tile_rows(); ++r)
          for (int64_t c = 0; c < kStepK; c += S::kWidth, to += S::kWidth) {
            const int64_t row = tile * kTileRows + r, k = step * kStepK + c;
            const int64_t left = row < count ? std::clamp<int64_t>(packed_.k - k, 0, S::kWidth) : 0;
            S::store_bf16(to, left > 0 ? S::load_partial(rows[row] + k, left) : S::zero());
          }
      }
  }

  void multiply(const std::byte** panels, int64_t count) {
    Tiles tiles(packed_.tile_rows());
    packed_.rows <= kTileRows ? stream(tiles, panels, count) : blocked(tiles, panels, count);
  }
  const float* sums() const { return sums_; }
  int64_t stride() const { return packed_.row_tiles() * kTileRows * kPanel; }

 private:
  // Sums stay in the tiles over the whole K, each weight is read once.
  void stream(Tiles& tiles, const std::byte* const* panels, int64_t count) {
    constexpr int64_t kPanels = 4, kAheadBytes = 4096;
    for (int64_t p = 0, step; p < count; p += step) {
      step = count - p >= kPanels ? kPanels : 1;
      const std::byte* ahead[kPanels];
      for (int64_t i = 0; i < step; ++i) ahead[i] = panels[p + i] + kAheadBytes;
      const BlockArgs<float> part{packed_.data, packed_.step_bytes(), packed_.steps(), sums_ + p * stride(), stride(), true};
      const TilesInMemory<S> source{panels + p, ahead, kTileBytes / kLineBytes};
      (step == 1 ? block<Rows, 1, 1, false, Tiles, TilesInMemory<S>>
                 : block<Rows, 1, kPanels, false, Tiles, TilesInMemory<S>>)(tiles, part, source);
    }
  }

  // Cut along K, so that two panels' part stays in L1; while two panels are used, the next two are read ahead.
  void blocked(Tiles& tiles, const std::byte** panels, int64_t count) {
    const int64_t row_tiles = packed_.row_tiles();
    for (int64_t step = 0; step < packed_.steps(); step += kSteps) {
      const int64_t steps = std::min(kSteps, packed_.steps() - step), lines = ceil_div(2 * kTileRows, row_tiles);
      for (int64_t p = 0; p < count; p += 2) {
        const int64_t pair = std::min<int64_t>(2, count - p);
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const int64_t done = tile / 2 * steps * lines * kLineBytes;  // read ahead by the tiles before
          const auto next = [&](int64_t q) { return (q < count ? panels[q] : panels[q - count] + kPartBytes) + done; };
          const std::byte* ahead[2] = {next(p + pair), next(std::min(p + pair + 1, 2 * count - 1))};
          const BlockArgs<float> part{packed_.tile(tile, step), packed_.step_bytes(), steps,
                                      sums_ + p * stride() + tile * kTileRows * kPanel, stride(), step == 0};
          const TilesInMemory<S> source{panels + p, ahead, lines};
          const bool two = tile + 1 < row_tiles;
          (two ? pair == 2 ? block<Rows, 2, 2, true, Tiles, TilesInMemory<S>> : block<Rows, 2, 1, true, Tiles, TilesInMemory<S>>
               : pair == 2 ? block<Rows, 1, 2, true, Tiles, TilesInMemory<S>> : block<Rows, 1, 1, true, Tiles, TilesInMemory<S>>)(
              tiles, part, source);
        }
      }
      for (int64_t p = 0; p < count; ++p) panels[p] += kPartBytes;
    }
  }

  PackedRows packed_;
  float* sums_;
};

}  // namespace
}  // namespace ingot
