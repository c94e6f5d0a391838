// Products of bf16 weights on tile registers (AMX). x is rounded to bf16; a sum takes its k in steps of 32, ascending,
// each step by one tile instruction. One row goes the same way as many, so it gets the same bits.
//
// Floors: N * K * 2 bytes of weights over the bandwidth of memory; 2 * rows * N * K operations, rows and N rounded up
// to whole tiles, at 1024 per cycle. A step of a 2 x 2 block is 64 cycles of products and 4 KiB of tile loads. The
// blocking follows probes on a machine with AMX; these loops themselves have been checked for their bits, not timed.
#pragma once

#include "matmul_parts.h"
#include "quantised.h"

namespace ingot {
namespace {

constexpr int64_t kTileRows = 16, kStepK = 32;

// How x lies in Team::shared: [row pairs][K steps][2 tiles]; up to 16 rows: [K steps][one tile of that many rows].
struct PackedRows {
  int64_t rows, k;

  int64_t steps() const { return ceil_div(k, kStepK); }
  int64_t tile_rows() const { return std::min(rows, kTileRows); }
  int64_t row_tiles() const { return ceil_div(rows, kTileRows); }
  int64_t step_bytes() const { return rows <= kTileRows ? rows * kLineBytes : 2 * kTileBytes; }
  int64_t bytes() const { return ceil_div(row_tiles(), 2) * steps() * step_bytes(); }
  int64_t offset(int64_t row_tile, int64_t step) const {
    return (row_tile / 2 * steps() + step) * step_bytes() + row_tile % 2 * kTileBytes;
  }
};

inline size_t matmul_tiles_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  const int64_t full_rows = ceil_div(matmul.rows, kTileRows) * kTileRows;  // fewer rows never need more
  return static_cast<size_t>(PackedRows{full_rows, matmul.k}.bytes());
}

template <typename S>
void pack_rows(const MatmulArgs& args, const PackedRows& packed, const Team& team) {
  const Team::Range mine = team.share(packed.row_tiles() * packed.steps());
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t tile = i / packed.steps(), step = i % packed.steps();
    auto* to = reinterpret_cast<uint16_t*>(team.shared + packed.offset(tile, step));
    for (int64_t r = 0; r < packed.tile_rows(); ++r)
      for (int64_t c = 0; c < kStepK; c += S::kWidth, to += S::kWidth) {
        const int64_t row = tile * kTileRows + r, k = step * kStepK + c;
        const int64_t left = row < args.rows ? std::clamp<int64_t>(args.k - k, 0, S::kWidth) : 0;
        S::store_bf16(to, left > 0 ? S::load_partial(args.x + row * args.k + k, left) : S::zero());
      }
  }
}

struct BlockArgs {
  const std::byte* x;  // tiles of the first K step
  int64_t step_bytes;
  const std::byte* const* panels;
  const std::byte* const* ahead;  // lines to prefetch, for each panel
  int64_t ahead_lines;            // in each K step
  int64_t steps;
  float* sums;  // [panel][row][16], continued unless `first`
  int64_t panel_stride;
  bool first;
};

// kRowTiles x kPanels tiles of sums, at most four: each tile of x and of weight read serves several products.
template <typename S, typename Tiles, int kRowTiles, int kPanels, bool kOnce>
void block(Tiles& tiles, const BlockArgs& args) {
  constexpr std::make_integer_sequence<int, kRowTiles> kEachRow;
  constexpr std::make_integer_sequence<int, kPanels> kEachPanel;
  constexpr std::make_integer_sequence<int, kRowTiles * kPanels> kEachSum;
  const auto sums_at = [&](int i) { return args.sums + i % kPanels * args.panel_stride + i / kPanels * 256; };
  for_each(kEachSum, [&]<int kI>() {
    if (args.first) {
      tiles.template zero<kI>();
    } else {
      tiles.template load<kI>(sums_at(kI));
    }
  });
  const std::byte* x = args.x;
  for (int64_t step = 0; step < args.steps; ++step, x += args.step_bytes) {
    for_each(kEachRow, [&]<int kR>() {
      if constexpr (kOnce) {
        tiles.template load_once<4 + kR>(x + kR * kTileBytes);
      } else {
        tiles.template load<4 + kR>(x + kR * kTileBytes);
      }
    });
    for_each(kEachPanel, [&]<int kP>() {
      tiles.template load<6 + kP % 2>(args.panels[kP] + step * kTileBytes);
      for (int64_t line = 0; line < args.ahead_lines; ++line)
        S::prefetch(args.ahead[kP] + (step * args.ahead_lines + line) * kLineBytes);
      for_each(kEachRow, [&]<int kR>() { tiles.template dot<kR * kPanels + kP, 4 + kR, 6 + kP % 2>(); });
    });
  }
  for_each(kEachSum, [&]<int kI>() { tiles.template store<kI>(sums_at(kI)); });
}

// Up to 32 rows: sums stay in the tiles over the whole K, each weight is read once. Threads own contiguous panels.
template <typename S, typename Tiles, int kRowTiles>
void stream_tiles(const MatmulArgs& args, const PackedRows& packed, const Team& team) {
  constexpr int64_t kPanels = 4 / kRowTiles, kAheadBytes = 4096;
  const int64_t width = args.gated ? 2 : 1, bytes = packed.steps() * kTileBytes;
  const Team::Range units = team.share(args.num_panels / width);
  Tiles tiles(packed.tile_rows());
  alignas(64) float sums[4 * kTileRows * kPanel];
  for (int64_t panel = units.begin * width, count; panel < units.end * width; panel += count) {
    count = std::min(kPanels, units.end * width - panel);
    const std::byte *data[kPanels], *ahead[kPanels];
    for (int64_t p = 0; p < count; ++p) {
      data[p] = panel_at(args, panel + p, bytes);
      ahead[p] = data[p] + kAheadBytes;
    }
    constexpr int64_t kStride = kRowTiles * kTileRows * kPanel;
    for (int64_t p = 0; p < count; p += count == kPanels ? kPanels : 1) {
      const BlockArgs part{team.shared, packed.step_bytes(), data + p,         ahead + p, kTileBytes / kLineBytes,
                           packed.steps(), sums + p * kStride, kStride, true};
      if (count == kPanels) {
        block<S, Tiles, kRowTiles, kPanels, false>(tiles, part);
      } else {
        block<S, Tiles, kRowTiles, 1, false>(tiles, part);
      }
    }
    epilogue<S>(args, 0, args.rows, panel, count, sums, kStride, PlainSums<S>());
  }
}

// Many rows: blocks of rows x panels, cut along K so that two panels' part (32 KiB) stays in L1 and the rows' part in
// L2, from where it streams past L1. While two panels are used, the next two are read ahead.
template <typename S, typename Tiles>
void blocked_tiles(const MatmulArgs& args, const PackedRows& packed, const Team& team) {
  constexpr int64_t kMaxRows = 512, kMaxPanels = 16, kSteps = 16, kPartBytes = kSteps * kTileBytes;
  const Blocks blocks = cut(args, team.count, 2 * kTileRows, kMaxRows, kMaxPanels);
  float* const sums = reinterpret_cast<float*>(team.scratch(kMaxRows * kMaxPanels * kPanel * sizeof(float)));
  const std::byte* data[kMaxPanels + 2];
  Tiles tiles(kTileRows);
  for (int64_t item = team.take(); item < blocks.count(); item = team.take()) {
    const int64_t row = item % blocks.row_blocks * blocks.rows, panel = item / blocks.row_blocks * blocks.panels;
    const int64_t rows = std::min(blocks.rows, args.rows - row), row_tiles = ceil_div(rows, kTileRows);
    const int64_t panels = std::min(blocks.panels, args.num_panels - panel), stride = row_tiles * kTileRows * kPanel;
    for (int64_t p = 0; p < panels; ++p) data[p] = panel_at(args, panel + p, packed.steps() * kTileBytes);
    for (int64_t step = 0; step < packed.steps(); step += kSteps) {
      const int64_t steps = std::min(kSteps, packed.steps() - step), lines = ceil_div(2 * kTileRows, row_tiles);
      data[panels] = data[0] + kPartBytes;
      data[panels + 1] = data[std::min<int64_t>(1, panels - 1)] + kPartBytes;
      for (int64_t p = 0; p < panels; p += 2) {
        const int64_t pair = std::min<int64_t>(2, panels - p);
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const int64_t done = tile / 2 * steps * lines * kLineBytes;  // read ahead by the tiles before
          const std::byte* ahead[2] = {data[p + pair] + done, data[std::min(p + pair + 1, panels + 1)] + done};
          const BlockArgs part{team.shared + packed.offset(row / kTileRows + tile, step), packed.step_bytes(), data + p,
                               ahead, lines, steps, sums + p * stride + tile * kTileRows * kPanel, stride, step == 0};
          const bool two = tile + 1 < row_tiles;
          (two ? pair == 2 ? block<S, Tiles, 2, 2, true> : block<S, Tiles, 2, 1, true>
               : pair == 2 ? block<S, Tiles, 1, 2, true> : block<S, Tiles, 1, 1, true>)(tiles, part);
        }
      }
      for (int64_t p = 0; p < panels; ++p) data[p] += kPartBytes;
    }
    epilogue<S>(args, row, rows, panel, panels, sums, stride, PlainSums<S>());
  }
}

template <typename S, typename Tiles>
void matmul_tiles(const MatmulArgs& args, const Team& team) {
  const PackedRows packed{args.rows, args.k};
  pack_rows<S>(args, packed, team);
  team.barrier();
  if (args.rows <= kTileRows) {
    stream_tiles<S, Tiles, 1>(args, packed, team);
  } else if (args.rows <= 2 * kTileRows) {
    stream_tiles<S, Tiles, 2>(args, packed, team);
  } else {
    blocked_tiles<S, Tiles>(args, packed, team);
  }
}

}  // namespace
}  // namespace ingot
