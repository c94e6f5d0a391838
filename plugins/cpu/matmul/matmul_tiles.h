// Products on tile registers (AMX): of bf16, x rounded to bf16, or of int8, x rounded to int8. A sum takes its k in
// steps of a tile, 32 or 64, ascending, each step by one tile instruction; one row of bf16 goes the same way as many,
// so it gets the same bits. Sums of int8 are exact, so that few rows may take another way (matmul_int8_kernel.h).
//
// Floors: the bytes of the weights over the bandwidth of memory; 2 * rows * N * K operations, rows and N rounded up to
// whole tiles, at 1024 (bf16) or 2048 (int8) per cycle. A step of a 2 x 2 block is 64 cycles of products and 4 KiB of
// tile loads. Weights that are stored otherwise than multiplied are unpacked: for few rows into a ring of tiles in L1,
// ahead of their use and between the products, for many rows a part of two panels (32 KiB) at once. The epilogue of a
// block hides between the products of the next one. A line of y that is read before it is written costs more than
// its products, so large results go past the caches (matmul_parts.h).
#pragma once

#include <utility>

#include "matmul/matmul_int8_kernel.h"
#include "matmul/tile_block.h"

namespace ingot {
namespace {

constexpr int64_t kTileRows = 16, kFewRows = 4, kFloatsOfLine = kLineBytes / int64_t{sizeof(float)};

// What a build may time for many rows beside the ways of matmul_parts.h: what is best depends on caches, and on how
// much of an epilogue hides between products.
constexpr int32_t kPartsOfK = 2;       // a part of K of all of a block's panels before the next one
constexpr int32_t kEpilogueApart = 3;  // behind the last product of its sums
constexpr int32_t kHalfParts = 4;      // of K: 16 KiB
static_assert(kHalfParts + 1 == kTileTactics);

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
  std::byte* line(int64_t row, int64_t step) const {
    return tile(row / kTileRows, step) + row % kTileRows * kLineBytes;
  }
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

  // x: the row, null for one that fills up a tile; meanwhile fetches as many numbers at `ahead`.
  void pack(int64_t row, const float* x, const float* ahead) const {
    for (int64_t k = 0; k < packed.steps() * kStepK; k += S::kWidth) {
      S::prefetch(ahead + k);
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

  // x: the row, null for one that fills up a tile; meanwhile fetches as many numbers at `ahead`.
  void pack(int64_t row, const float* x, const float* ahead) const {
    const auto place = [this, row, ahead](int64_t k) {
      for (int64_t i = 0; i < kStepK; i += kFloatsOfLine) S::prefetch(ahead + k + i);
      return reinterpret_cast<int8_t*>(packed.line(row, k / kStepK));
    };
    if (x != nullptr) {
      scales[row] = round_row<S>(x, packed.k, packed.steps() * kStepK, place);
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

// Up to 32 rows: sums stay in the tiles over the whole K, each weight is read once. Threads own contiguous panels.
template <typename S, typename Tiles, typename Rows, typename Weight, int kRowTiles>
void stream_tiles(const MatmulArgs& args, const Rows& x, const Team& team) {
  constexpr int64_t kPanels = 4 / kRowTiles, kStride = kRowTiles * kTileRows * kPanel;
  constexpr bool kOnce = !Weight::kInPlace;  // rows stream past the ring, which is to stay in L1
  using Ring = TileRing<Weight, kPanels>;
  const Weight weight(args);
  const PackedRows& packed = x.packed;
  const int64_t width = args.gated ? 2 : 1, bytes = weight.panel_bytes(),
                units = ceil_div(packed.steps(), Weight::kTiles);
  const Team::Range mine = team.share(args.num_panels / width);
  const int64_t end = mine.end * width;
  Tiles tiles(packed.tile_rows());
  alignas(64) typename Rows::Sum sums[4 * kTileRows * kPanel];
  std::byte* slots = nullptr;
  if constexpr (!Weight::kInPlace) slots = team.scratch(Ring::kBytes);
  const auto place = [&](const std::byte** data,
                         int64_t panel) {  // where all kPanels lie; beyond the last one, that one
    for (int64_t p = 0; p < kPanels; ++p)
      data[p] = panel_at(args, std::min(panel + p, end - 1), bytes) + (Weight::kInPlace ? weight.data_offset() : 0);
  };
  int64_t unpacked = 0;  // units that went through the ring of each panel
  bool started = false;
  for (int64_t panel = mine.begin * width, count; panel < end; panel += count) {
    count = std::min(kPanels, end - panel);
    const std::byte *data[kPanels], *next[kPanels];
    place(data, panel);
    place(next, std::min(panel + count, end - 1));
    for (int64_t p = 0; p < kPanels; ++p)  // headers, for the epilogue and for unpacking
      for (int64_t at = 0; at < weight.data_offset(); at += kLineBytes)
        S::prefetch(next[p] - (Weight::kInPlace ? weight.data_offset() : 0) + at);
    for (int64_t p = 0; p < count; p += count == kPanels ? kPanels : 1) {
      const BlockArgs<typename Rows::Sum> part{
          packed.data, packed.step_bytes(), packed.steps(), sums + p * kStride, kStride, true};
      const auto multiply = [&](const auto& source) {
        if (count == kPanels) {
          block<Rows, kRowTiles, kPanels, kOnce>(tiles, part, source);
        } else {
          block<Rows, kRowTiles, 1, kOnce>(tiles, part, source);
        }
      };
      if constexpr (Weight::kInPlace) {
        multiply(TilesOnce<S, kPanels>{data + p, next + p, packed.steps()});
      } else {
        const bool goes_on = panel + 2 * kPanels <= end && Ring::goes_on(units);
        const Ring ring{weight, data + p, goes_on ? next : nullptr, units, unpacked, slots};
        if (!started) ring.start(count == kPanels ? kPanels : 1);
        multiply(ring);
        started = goes_on;
        unpacked += units;
      }
    }
    epilogue<S>(args, 0, args.rows, panel, count, sums, kStride, x.sums(args, weight));
  }
}

// Many rows: blocks of rows x panels. Two panels' part of K (32 KiB of tiles) stays in L1, where the rows stream past
// it from L2: all of K where a block's rows fit there, else a part after another, between which sums rest in L2 too.
// While a part is used the next one is read ahead, and between its products the sums before it become numbers of y.
template <typename S, typename Tiles, typename Rows, typename Weight>
class BlockedTiles {
  using Sum = typename Rows::Sum;
  static constexpr int64_t kMostSteps = 16, kPartBytes = kMostSteps * kTileBytes, kPairRows = 2 * kTileRows;
  static constexpr int64_t kRowsBytes = 1408 << 10;  // of a block's rows in L2 (2 MiB)

 public:
  BlockedTiles(const MatmulArgs& args, const Rows& x, const Team& team)
      : args_(args),
        packed_(x.packed),
        team_(team),
        weight_(args),
        made_(x.sums(args, weight_)),
        part_steps_(args.tactic == kHalfParts ? kMostSteps / 2 : kMostSteps) {
    BlockLimits limits = block_limits(args, kPairRows, 512, 16);
    const auto fits = [&](int64_t rows) {
      return ceil_div(std::min(rows, args.rows), kPairRows) * packed_.steps() * packed_.step_bytes() <= kRowsBytes;
    };
    // half of the rows read weights twice, which costs int8 less than rows from beyond L2; bf16 has twice the weights
    if (Rows::kStepK == kTileK && !fits(limits.rows) && fits(limits.rows / 2)) limits.rows /= 2;
    whole_ = fits(limits.rows) && args.tactic != kPartsOfK;
    blocks_ = cut(args, team.count, kPairRows, limits, whole_ ? 6 : 2);
    const int64_t sum_bytes = blocks_.rows * (whole_ ? 2 : blocks_.panels) * kPanel * int64_t{sizeof(Sum)};
    unpacked_ = team.scratch(static_cast<size_t>(sum_bytes + 2 * kPartBytes));
    sums_ = reinterpret_cast<Sum*>(unpacked_ + 2 * kPartBytes);
  }

  void run() {
    Tiles tiles(packed_.tile_rows());
    const int64_t items = blocks_.count();
    for (int64_t item = team_.next_of_shares(items); item < items; item = team_.next_of_shares(items)) {
      const Block here = block_at(item), then = block_at(std::min(item + 1, items - 1));
      const int64_t span = whole_ ? packed_.steps() : part_steps_;
      for (int64_t begin = 0; begin < packed_.steps(); begin += span) {
        const int64_t end = std::min(begin + span, packed_.steps());
        for (int64_t p = 0; p < here.panels; p += 2)
          for (int64_t step = begin; step < end; step += part_steps_) {
            Part next{then.panel, 0};  // of the block that this thread is likely to take
            if (step + part_steps_ < end)
              next = {here.panel + p, step + part_steps_};
            else if (p + 2 < here.panels)
              next = {here.panel + p + 2, begin};
            else if (end < packed_.steps())
              next = {here.panel, end};
            multiply(tiles, here, {here.panel + p, step}, next);
          }
      }
    }
    finish(0, pending_.rows);
  }

  // In each step, between its products.
  void ride(int64_t step) const {
    if (step % 2 == 0) finish(step / 2 * rows_at_once_, rows_at_once_);
  }

 private:
  struct Block {
    int64_t row, rows, panel, panels;
  };
  struct Part {
    int64_t panel, step;  // of two panels; part_steps_ or what is left of K
  };
  // Sums that are to become numbers of y.
  struct Pending {
    int64_t row, rows = 0, panel, panels;
    const Sum* sums;
    int64_t stride;
  };
  struct Source {
    TilesInMemory<S, true> tiles;
    const BlockedTiles& owner;

    const std::byte* tile(int panel, int64_t step) const { return tiles.tile(panel, step); }
    void work(int panel, int64_t step) const {
      tiles.work(panel, step);
      if (panel == 0) owner.ride(step);
    }
  };

  // Where rows stay in L2, a thread takes all panels before it goes on to others.
  Block block_at(int64_t item) const {
    const int64_t rows = whole_ ? item / blocks_.panel_blocks : item % blocks_.row_blocks;
    const int64_t panels = whole_ ? item % blocks_.panel_blocks : item / blocks_.row_blocks;
    const int64_t row = rows * blocks_.rows, panel = panels * blocks_.panels;
    return {row, std::min(blocks_.rows, args_.rows - row), panel, std::min(blocks_.panels, args_.num_panels - panel)};
  }
  int64_t steps_of(const Part& part) const { return std::min(part_steps_, packed_.steps() - part.step); }
  const std::byte* panel(int64_t index) const { return panel_at(args_, index, weight_.panel_bytes()); }
  const std::byte* stored(const std::byte* panel, int64_t step) const {
    return panel + weight_.data_offset() + step / Weight::kTiles * kTileBytes;
  }

  void finish(int64_t from, int64_t rows) const {
    rows = std::min(rows, pending_.rows - from);
    if (rows > 0)
      epilogue<S>(args_, pending_.row + from, rows, pending_.panel, pending_.panels, pending_.sums + from * kPanel,
                  pending_.stride, made_);
  }

  // The tiles of a part of a panel, the first or second of two.
  const std::byte* prepare(int64_t index, const Part& part, int64_t which) {
    const std::byte* from = panel(index);
    if constexpr (Weight::kInPlace) {
      return stored(from, part.step);
    } else {
      std::byte* to = unpacked_ + which * kPartBytes;
      for (int64_t s = 0; s < steps_of(part); s += Weight::kTiles)
        weight_.unpack(from, (part.step + s) / Weight::kTiles, to + s * kTileBytes,
                       stored(from, part.step + s + 2 * Weight::kTiles));
      return to;
    }
  }

  // Rows of a block x a part of two panels.
  void multiply(Tiles& tiles, const Block& here, const Part& part, const Part& next) {
    const int64_t pair = std::min<int64_t>(2, here.panel + here.panels - part.panel), steps = steps_of(part);
    const int64_t row_tiles = ceil_div(here.rows, kTileRows), stride = row_tiles * kTileRows * kPanel;
    Sum* const sums = sums_ + (whole_ ? 0 : part.panel - here.panel) * stride;
    const std::byte *data[2] = {}, *fetched[2], *ahead[2];
    for (int64_t i = 0; i < pair; ++i) data[i] = prepare(part.panel + i, part, i);
    const int64_t header = next.step == 0 ? weight_.data_offset() : 0;
    for (int64_t i = 0; i < 2; ++i)
      fetched[i] = stored(panel(std::min(next.panel + i, args_.num_panels - 1)), next.step) - header;
    const int64_t lines = ceil_div(steps_of(next) * kTileLines, Weight::kTiles) + header / kLineBytes;
    const int64_t lines_a_step = ceil_div(lines, ceil_div(row_tiles, 2) * steps);
    for (int64_t tile = 0; tile < row_tiles; tile += 2) {
      const int64_t done = tile / 2 * steps * lines_a_step;
      for (int64_t i = 0; i < 2; ++i) ahead[i] = fetched[i] + done * kLineBytes;
      const BlockArgs<Sum> args{packed_.tile(here.row / kTileRows + tile, part.step),
                                packed_.step_bytes(),
                                steps,
                                sums + tile * kTileRows * kPanel,
                                stride,
                                part.step == 0};
      const Source source{{data, ahead, done < lines ? lines_a_step : 0}, *this};
      const bool two = tile + 1 < row_tiles;
      rows_at_once_ = ceil_div(pending_.rows, ceil_div(steps, 2));
      (two         ? pair == 2 ? block<Rows, 2, 2, true, Tiles, Source> : block<Rows, 2, 1, true, Tiles, Source>
       : pair == 2 ? block<Rows, 1, 2, true, Tiles, Source>
                   : block<Rows, 1, 1, true, Tiles, Source>)(tiles, args, source);
      pending_.rows = 0;
      if (part.step + steps == packed_.steps())
        pending_ = {here.row + tile * kTileRows,
                    std::min(kPairRows, here.rows - tile * kTileRows),
                    part.panel,
                    pair,
                    args.sums,
                    stride};
      if (args_.tactic == kEpilogueApart) {
        finish(0, pending_.rows);
        pending_.rows = 0;
      }
    }
  }

  const MatmulArgs& args_;
  const PackedRows& packed_;
  const Team& team_;
  const Weight weight_;
  const decltype(std::declval<const Rows&>().sums(std::declval<const MatmulArgs&>(),
                                                  std::declval<const Weight&>())) made_;
  const int64_t part_steps_;
  Blocks blocks_{};
  bool whole_;  // whether a block's rows stay in L2 over all of K
  std::byte* unpacked_;
  Sum* sums_;  // [panel][rows][16] of two panels, or of all of a block
  Pending pending_{};
  int64_t rows_at_once_ = 0;
};

template <typename S, typename Tiles, typename Rows, typename Weight>
void matmul_tiles(const MatmulArgs& args, const Team& team) {
  const OwnOrShared place(args, team);
  const Rows x(args.rows, args.k, place.memory(Rows::bytes(args.rows, args.k)));
  const RowsOfX row_of(args, team);
  const Team::Range mine = place.share(x.packed.padded_rows());
  for (int64_t row = mine.begin; row < mine.end; ++row)
    x.pack(row, row < args.rows ? row_of(row) : nullptr, row_of.next(row));
  place.wait();
  if (passes_over_panels(args, kTileRows)) {
    stream_tiles<S, Tiles, Rows, Weight, 1>(args, x, team);
  } else if (passes_over_panels(args, 2 * kTileRows)) {
    stream_tiles<S, Tiles, Rows, Weight, 2>(args, x, team);
  } else {
    BlockedTiles<S, Tiles, Rows, Weight>(args, x, team).run();
  }
  end_streams<S>(args);
}

// Rows as bf16: fewer never need more than a tile of them.
template <typename Rows>
size_t matmul_tiles_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  return Rows::bytes(ceil_div(matmul.rows, kTileRows) * kTileRows, matmul.k);
}

// Products of few rows on vectors, compiled for no more of them.
template <typename S>
struct FewRows : S {
  static constexpr int kByteRows = kFewRows, kCodeRows = kFewRows;
};

// Rows as int8: the fewest go the way of machines without tiles, where a weight is read but not copied into tiles.
template <typename S, typename Tiles, typename Format>
void matmul_int8_tiles(const MatmulArgs& args, const Team& team) {
  if (args.rows <= kFewRows) {
    if constexpr (Format::kTiles == 1) {
      matmul_bytes<FewRows<S>, Format>(args, team);
    } else {
      matmul_codes<FewRows<S>>(args, team);
    }
    end_streams<S>(args);
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
