// Products on tile registers (AMX): of bf16, x rounded to bf16, or of int8, x rounded to int8. A sum takes its k in steps
// of a tile, 32 or 64, ascending, each step by one tile instruction; one row of bf16 goes the same way as many, so it gets
// the same bits. Sums of int8 are exact, so that few rows may take another way (matmul_int8_kernel.h).
//
// Floors: the bytes of the weights over the bandwidth of memory; 2 * rows * N * K operations, rows and N rounded up to
// whole tiles, at 1024 (bf16) or 2048 (int8) per cycle. A step of a 2 x 2 block is 64 cycles of products and 4 KiB of tile
// loads. Weights that are stored otherwise than multiplied are unpacked: for few rows into a ring of tiles in L1, ahead of
// their use and between the products, for many rows a part of two panels (32 KiB) at once. The blocking follows probes on a
// machine with AMX; these loops themselves have been checked for their bits, not timed.
#pragma once

#include "matmul_int8_kernel.h"
#include "matmul_parts.h"
#include "quantised.h"

namespace ingot {
namespace {

constexpr int64_t kTileRows = 16, kFewRows = 4;

// How prepared rows of x lie: [row pairs][K steps][2 tiles]; up to 16 rows: [K steps][one tile of that many rows].
struct PackedRows {
  int64_t rows, k, step_k;
  std::byte* data;

  int64_t steps() const { return ceil_div(k, step_k); }
  int64_t tile_rows() const { return std::min(rows, kTileRows); }
  int64_t row_tiles() const { return ceil_div(rows, kTileRows); }
  int64_t step_bytes() const { return rows <= kTileRows ? rows * kLineBytes : 2 * kTileBytes; }
  int64_t bytes() const { return ceil_div(row_tiles(), 2) * steps() * step_bytes(); }
  std::byte* tile(int64_t row_tile, int64_t step) const {
    return data + (row_tile / 2 * steps() + step) * step_bytes() + row_tile % 2 * kTileBytes;
  }
  int64_t padded_rows() const { return row_tiles() * tile_rows(); }  // those of whole tiles
  std::byte* line(int64_t row, int64_t step) const { return tile(row / kTileRows, step) + row % kTileRows * kLineBytes; }
};

// x in bf16.
template <typename S>
struct Bf16Rows {
  using Sum = float;
  static constexpr int64_t kStepK = 32;
  PackedRows packed;

  Bf16Rows(int64_t rows, int64_t k, std::byte* memory) : packed{rows, k, kStepK, memory} {}
  static size_t bytes(int64_t rows, int64_t k) {
    return static_cast<size_t>(PackedRows{rows, k, kStepK, nullptr}.bytes());
  }

  // x: the row, null for one that fills up a tile.
  void pack(int64_t row, const float* x) const {
    for (int64_t k = 0; k < packed.steps() * kStepK; k += S::kWidth) {
      const int64_t left = x ? std::clamp<int64_t>(packed.k - k, 0, S::kWidth) : 0;
      auto* to = reinterpret_cast<uint16_t*>(packed.line(row, k / kStepK)) + k % kStepK;
      S::store_bf16(to, left > 0 ? S::load_partial(x + k, left) : S::zero());
    }
  }

  template <typename Weight>
  auto sums(const MatmulArgs& args, const Weight& weight) const {
    return weight.template sums<S>(args);
  }
  template <int kSums, int kX, int kWeight, typename Tiles>
  static void dot(Tiles& tiles) {
    tiles.template dot_bf16<kSums, kX, kWeight>();
  }
};

// x in int8, the scales of its rows before it.
template <typename S>
struct Int8Rows {
  using Sum = int32_t;
  static constexpr int64_t kStepK = kTileK;
  float* scales;
  PackedRows packed;

  static int64_t scale_bytes(int64_t rows) { return ceil_div(rows * 4, kLineBytes) * kLineBytes; }
  Int8Rows(int64_t rows, int64_t k, std::byte* memory)
      : scales(reinterpret_cast<float*>(memory)), packed{rows, k, kStepK, memory + scale_bytes(rows)} {}
  static size_t bytes(int64_t rows, int64_t k) {
    return static_cast<size_t>(scale_bytes(rows) + PackedRows{rows, k, kStepK, nullptr}.bytes());
  }

  // x: the row, null for one that fills up a tile.
  void pack(int64_t row, const float* x) const {
    const auto place = [this, row](int64_t k) { return reinterpret_cast<int8_t*>(packed.line(row, k / kStepK)); };
    if (x != nullptr) {
      scales[row] = round_row<S>(x, packed.k, packed.steps() * kStepK, place).scale;
    } else {
      for (int64_t k = 0; k < packed.k; k += kStepK) std::fill_n(place(k), kStepK, int8_t{0});
    }
  }

  template <typename Weight>
  Int8Sums<S> sums(const MatmulArgs& args, const Weight& weight) const {
    return {{args, weight.panel_bytes()}, scales};
  }
  template <int kSums, int kX, int kWeight, typename Tiles>
  static void dot(Tiles& tiles) {
    tiles.template dot_int8<kSums, kX, kWeight>();
  }
};

// How a weight comes to its tiles: kTiles of them from each KiB that is stored, by unpack where that is not the tile itself.
struct Bf16Tiles {
  static constexpr int64_t kTiles = 1;
  static constexpr bool kInPlace = true, kScaled = false;  // whether panels begin with scales
  int64_t k;

  template <typename Args>
  explicit Bf16Tiles(const Args& args) : k(args.k) {}
  int64_t panel_bytes() const { return ceil_div(k, 32) * kTileBytes; }
  int64_t data_offset() const { return 0; }
  template <typename S>
  PlainSums<S> sums(const MatmulArgs&) const {
    return {};
  }
};

template <typename I, typename Format>
struct Int8Tiles : Format {
  static constexpr bool kInPlace = Format::kTiles == 1, kScaled = true;

  using Format::Format;
  void unpack(const std::byte* panel, int64_t unit, std::byte* to) const {
    if constexpr (!kInPlace) Format::template unpack<I>(panel, unit, to);
  }
};

// Quantised weights as bf16, which holds them exactly.
template <typename I, typename Format>
struct NarrowedTiles : Format {
  static constexpr int64_t kTiles = 2 * Format::kTiles;
  static constexpr bool kInPlace = false, kScaled = true;

  using Format::Format;
  void unpack(const std::byte* panel, int64_t unit, std::byte* to) const {
    alignas(64) std::byte bytes[Format::kTiles * kTileBytes];
    const std::byte* tiles = Format::template tiles<I>(panel, unit * Format::kTiles, Format::kTiles, bytes);
    narrow_lines<I>(tiles, Format::kTiles * kTileLines, to);
  }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, this->panel_bytes()};
  }
};

// Tiles of several panels, one after another, and lines to read ahead meanwhile, so many in each step.
template <typename S>
struct TilesInMemory {
  const std::byte* const* tiles;
  const std::byte* const* ahead;
  int64_t ahead_lines;

  const std::byte* tile(int panel, int64_t step) const { return tiles[panel] + step * kTileBytes; }
  void work(int panel, int64_t step) const {
    for (int64_t line = 0; line < ahead_lines; ++line)
      S::prefetch(ahead[panel] + (step * ahead_lines + line) * kLineBytes);
  }
};

// Tiles that are unpacked kLead KiB of weights before their use.
template <typename Weight, int kPanels>
struct TileRing {
  static constexpr int64_t kLead = Weight::kTiles > 2 ? 1 : 2, kSlots = kLead + 1;
  static constexpr int64_t kBytes = kPanels * kSlots * Weight::kTiles * kTileBytes;
  const Weight& weight;
  const std::byte* const* panels;
  int64_t units;  // KiB of a panel
  std::byte* slots;

  std::byte* slot(int panel, int64_t unit) const {
    return slots + (panel * kSlots + unit % kSlots) * Weight::kTiles * kTileBytes;
  }
  void start(int count) const {
    for (int panel = 0; panel < count; ++panel)
      for (int64_t unit = 0; unit < std::min(kLead, units); ++unit)
        weight.unpack(panels[panel], unit, slot(panel, unit));
  }
  const std::byte* tile(int panel, int64_t step) const {
    return slot(panel, step / Weight::kTiles) + step % Weight::kTiles * kTileBytes;
  }
  void work(int panel, int64_t step) const {
    const int64_t unit = step / Weight::kTiles + kLead;
    if (step % Weight::kTiles == 0 && unit < units) weight.unpack(panels[panel], unit, slot(panel, unit));
  }
};

template <typename Sum>
struct BlockArgs {
  const std::byte* x;  // tiles of the first K step
  int64_t step_bytes;
  int64_t steps;
  Sum* sums;  // [panel][row][16], continued unless `first`
  int64_t panel_stride;
  bool first;
};

// kRowTiles x kPanels tiles of sums, at most four: each tile of x and of weight read serves several products.
template <typename Rows, int kRowTiles, int kPanels, bool kOnce, typename Tiles, typename Source>
void block(Tiles& tiles, const BlockArgs<typename Rows::Sum>& args, const Source& weights) {
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
      tiles.template load<6 + kP % 2>(weights.tile(kP, step));
      weights.work(kP, step);
      for_each(kEachRow, [&]<int kR>() { Rows::template dot<kR * kPanels + kP, 4 + kR, 6 + kP % 2>(tiles); });
    });
  }
  for_each(kEachSum, [&]<int kI>() { tiles.template store<kI>(sums_at(kI)); });
}

// Up to 32 rows: sums stay in the tiles over the whole K, each weight is read once. Threads own contiguous panels.
template <typename S, typename Tiles, typename Rows, typename Weight, int kRowTiles>
void stream_tiles(const MatmulArgs& args, const Rows& x, const Team& team) {
  constexpr int64_t kPanels = 4 / kRowTiles, kAheadBytes = 4096, kStride = kRowTiles * kTileRows * kPanel;
  using Ring = TileRing<Weight, kPanels>;
  const Weight weight(args);
  const PackedRows& packed = x.packed;
  const int64_t width = args.gated ? 2 : 1, bytes = weight.panel_bytes();
  const Team::Range units = team.share(args.num_panels / width);
  Tiles tiles(packed.tile_rows());
  alignas(64) typename Rows::Sum sums[4 * kTileRows * kPanel];
  std::byte* slots = nullptr;
  if constexpr (!Weight::kInPlace) slots = team.scratch(Ring::kBytes);
  for (int64_t panel = units.begin * width, count; panel < units.end * width; panel += count) {
    count = std::min(kPanels, units.end * width - panel);
    const std::byte *data[kPanels], *ahead[kPanels];
    for (int64_t p = 0; p < count; ++p) {
      data[p] = panel_at(args, panel + p, bytes) + (Weight::kInPlace ? weight.data_offset() : 0);
      ahead[p] = data[p] + kAheadBytes;
    }
    for (int64_t p = 0; p < count; p += count == kPanels ? kPanels : 1) {
      const BlockArgs<typename Rows::Sum> part{packed.data, packed.step_bytes(), packed.steps(),
                                               sums + p * kStride, kStride, true};
      const auto multiply = [&](const auto& source) {
        constexpr bool kOnce = !Weight::kInPlace;  // rows stream past the ring, which is to stay in L1
        if (count == kPanels) {
          block<Rows, kRowTiles, kPanels, kOnce>(tiles, part, source);
        } else {
          block<Rows, kRowTiles, 1, kOnce>(tiles, part, source);
        }
      };
      if constexpr (Weight::kInPlace) {
        multiply(TilesInMemory<S>{data + p, ahead + p, kTileBytes / kLineBytes});
      } else {
        const Ring ring{weight, data + p, ceil_div(packed.steps(), Weight::kTiles), slots};
        ring.start(count == kPanels ? kPanels : 1);
        multiply(ring);
      }
    }
    epilogue<S>(args, 0, args.rows, panel, count, sums, kStride, x.sums(args, weight));
  }
}

// Many rows: blocks of rows x panels, cut along K so that two panels' part (32 KiB) stays in L1 and the rows' part in
// L2, from where it streams past L1. While two panels are used, the next two are read ahead.
template <typename S, typename Tiles, typename Rows, typename Weight>
void blocked_tiles(const MatmulArgs& args, const Rows& x, const Team& team) {
  using Sum = typename Rows::Sum;
  constexpr int64_t kSteps = 16, kPartBytes = kSteps * kTileBytes, kStoredBytes = kPartBytes / Weight::kTiles;
  const BlockLimits limits = block_limits(args, 2 * kTileRows, 512, 16);
  const int64_t sum_bytes = limits.rows * limits.panels * kPanel * static_cast<int64_t>(sizeof(Sum));
  const Weight weight(args);
  const PackedRows& packed = x.packed;
  const Blocks blocks = cut(args, team.count, 2 * kTileRows, limits);
  std::byte* const scratch = team.scratch(static_cast<size_t>(sum_bytes + 2 * kPartBytes));
  Sum* const sums = reinterpret_cast<Sum*>(scratch);
  Tiles tiles(packed.tile_rows());
  const auto stored = [&](int64_t panel, int64_t step) {  // a panel's part as it lies in memory
    return panel_at(args, panel, weight.panel_bytes()) + weight.data_offset() + step / Weight::kTiles * kTileBytes;
  };
  for (int64_t item = team.take(); item < blocks.count(); item = team.take()) {
    const int64_t row = item % blocks.row_blocks * blocks.rows, panel = item / blocks.row_blocks * blocks.panels;
    const int64_t rows = std::min(blocks.rows, args.rows - row), row_tiles = ceil_div(rows, kTileRows);
    const int64_t panels = std::min(blocks.panels, args.num_panels - panel), stride = row_tiles * kTileRows * kPanel;
    const int64_t lines = ceil_div(2 * kTileRows / Weight::kTiles, row_tiles);  // to read ahead in a step
    for (int64_t step = 0; step < packed.steps(); step += kSteps) {
      const int64_t steps = std::min(kSteps, packed.steps() - step);
      for (int64_t p = 0; p < panels; p += 2) {
        const int64_t pair = std::min<int64_t>(2, panels - p);
        const std::byte *data[2], *ahead[2];
        for (int64_t i = 0; i < pair; ++i) {
          data[i] = stored(panel + p + i, step);
          if constexpr (!Weight::kInPlace) {
            std::byte* to = scratch + sum_bytes + i * kPartBytes;
            const std::byte* whole = panel_at(args, panel + p + i, weight.panel_bytes());
            for (int64_t s = 0; s < steps; s += Weight::kTiles)
              weight.unpack(whole, (step + s) / Weight::kTiles, to + s * kTileBytes);
            data[i] = to;
          }
        }
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const int64_t done = tile / 2 * steps * lines * kLineBytes;  // read ahead by the tiles before
          for (int64_t i = 0; i < 2; ++i) {
            const int64_t next = p + pair + i;
            ahead[i] = (next < panels ? stored(panel + next, step)
                                      : stored(panel + std::min(i, panels - 1), step) + kStoredBytes) + done;
          }
          const BlockArgs<Sum> part{packed.tile(row / kTileRows + tile, step), packed.step_bytes(), steps,
                                    sums + p * stride + tile * kTileRows * kPanel, stride, step == 0};
          const TilesInMemory<S> source{data, ahead, lines};
          const bool two = tile + 1 < row_tiles;
          (two ? pair == 2 ? block<Rows, 2, 2, true, Tiles, TilesInMemory<S>> : block<Rows, 2, 1, true, Tiles, TilesInMemory<S>>
               : pair == 2 ? block<Rows, 1, 2, true, Tiles, TilesInMemory<S>> : block<Rows, 1, 1, true, Tiles, TilesInMemory<S>>)(
              tiles, part, source);
        }
      }
    }
    epilogue<S>(args, row, rows, panel, panels, sums, stride, x.sums(args, weight));
  }
}

template <typename S, typename Tiles, typename Rows, typename Weight>
void matmul_tiles(const MatmulArgs& args, const Team& team) {
  const OwnOrShared place(args, team);
  const Rows x(args.rows, args.k, place.memory(Rows::bytes(args.rows, args.k)));
  const RowsOfX row_of(args, team);
  const Team::Range mine = place.share(x.packed.padded_rows());
  for (int64_t row = mine.begin; row < mine.end; ++row) x.pack(row, row < args.rows ? row_of(row) : nullptr);
  place.wait();
  if (passes_over_panels(args, kTileRows)) {
    stream_tiles<S, Tiles, Rows, Weight, 1>(args, x, team);
  } else if (passes_over_panels(args, 2 * kTileRows)) {
    stream_tiles<S, Tiles, Rows, Weight, 2>(args, x, team);
  } else {
    blocked_tiles<S, Tiles, Rows, Weight>(args, x, team);
  }
}

// Rows as bf16: fewer never need more than a tile of them.
template <typename Rows>
size_t matmul_tiles_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  return Rows::bytes(ceil_div(matmul.rows, kTileRows) * kTileRows, matmul.k);
}

// Rows as int8: the fewest go the way of machines without tiles, where a weight is read but not copied into tiles.
template <typename S, typename Tiles, typename Format>
void matmul_int8_tiles(const MatmulArgs& args, const Team& team) {
  if (args.rows <= kFewRows) {
    matmul_bytes<S, Format>(args, team);
  } else {
    matmul_tiles<S, Tiles, Int8Rows<S>, Int8Tiles<S, Format>>(args, team);
  }
}

template <typename S>
size_t matmul_int8_tiles_scratch(const void* args) {
  MatmulArgs few = *static_cast<const MatmulArgs*>(args);
  few.rows = std::min(few.rows, kFewRows);
  return std::max(matmul_tiles_scratch<Int8Rows<S>>(args), matmul_int8_scratch(&few));
}

}  // namespace
}  // namespace ingot
