// Weights in groups (w2t, w3t, w4t, w4ts, w8t, w8ts) times rows of int8 on tile registers (AMX), with the bits of
// matmul_group_kernel.h: a tile's sums are those of one group, exact in int32; then they leave it and join the others
// in float32. Groups of less than the 64 k of a tile have tiles of their own, whose other lines are zeros.
//
// Floors: a group of 128 k takes 64 cycles of products for 16 rows and two panels, and about as many to leave the
// tiles.
#pragma once

#include "matmul/matmul_group_kernel.h"

namespace ingot {
namespace {

template <typename I, typename Tiles, typename Stored>
struct GroupTileProducts {
  using Vectors = GroupProducts<I, Stored>;
  using Format = Stored;
  using Total = float;
  static int64_t run_k(int64_t group) { return group; }
  static constexpr int kRows = 16, kPanels = 2;
  static constexpr int64_t kPart = 1024;
  static constexpr int64_t kMostTiles = kPart / RoundedRows::kShortestRun;  // of the shortest groups
  static constexpr int64_t kUnpackedBytes = 2 * kMostTiles * kTileBytes;    // of the values, then of their further bits
  static constexpr int64_t kBlockRows = 256, kBlockPanels = 32;
  static constexpr bool kWholeOnce = false;
  static_assert(I::kWidth == kPanel);

  // Tiles of 64 k of all rows, one after another.
  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    std::fill_n(to.runs(first), count * to.run_stride(), 0);
    for (int64_t r = 0; r < count; ++r) {
      const auto place = [&](int64_t k) { return to.codes(first) + k * count + r * kTileK; };
      to.scales()[first + r] = round_row<I>(x[r], to.k, to.padded_k(), place);
      for (int64_t k = 0; k < to.padded_k(); k += kTileK) Vectors::add_runs(to, first + r, k, place(k));
    }
  }

  // How a part of K lies in tiles.
  struct Cut {
    int64_t group, groups, steps;  // steps: tiles of a group

    explicit Cut(const Int8Tile& t)
        : group(int64_t{1} << t.group_bits),
          groups(ceil_div(t.tiles * kTileK, group)),
          steps(std::max<int64_t>(1, group / kTileK)) {}
    int64_t tile_k() const { return std::min(group, kTileK); }
  };

  template <int kP>
  static bool has_more_bits(const Int8Tile& t) {
    return Vectors::kMore && (panel_has_more_bits(t.panels[0]) || panel_has_more_bits(t.panels[kP - 1]));
  }

  template <int kP>
  static void look_up(const Int8Tile& t, const Cut& cut) {
    for (int p = 0; p < kP; ++p) {
      std::byte* const to = t.unpacked + p * kUnpackedBytes;
      look_up(t, cut, p, panel_table(t.panels[p]), to);
      if (has_more_bits<kP>(t)) look_up(t, cut, p, panel_more_bits(t.panels[p]), to + kMostTiles * kTileBytes);
    }
  }

  static void look_up(const Int8Tile& t, const Cut& cut, int p, const int8_t* values, std::byte* to) {
    const int64_t lines = cut.tile_k() / Format::kLineK;  // of a tile
    [[maybe_unused]] const auto table = I::table(values);
    if (lines * Format::kLineK < kTileK) std::fill_n(to, cut.groups * kTileBytes, std::byte{0});
    for (int64_t l = 0; l < cut.groups * cut.steps * lines; ++l) {
      const std::byte* const codes = t.lines[p] + l * Format::kCodeBytes;
      // where the line's k lie among the 64 of their tile
      const int64_t at = l * Format::kLineK % kTileK / 4 * kLineBytes;
      std::byte* const line = to + l / lines * kTileBytes + at;
      for_each(std::make_integer_sequence<int, Vectors::kLineQuads>(), [&]<int q>() __attribute__((always_inline)) {
        if constexpr (Vectors::kBytes)
          I::store_weights(line + q * kLineBytes, I::load_weights(codes + q * kLineBytes));
        else
          I::store_weights(line + q * kLineBytes, I::template look_up<Format::kBits, q>(codes, table));
      });
      for (int i = 0; i < Vectors::kCodeLines; ++i)
        I::prefetch_far(t.next[p] +
                        (l * Vectors::kLineQuads + i * Vectors::kLineQuads / Vectors::kCodeLines) * t.next_step);
    }
  }

  template <bool kFirst, int kR, int kP>
  static void tile(const Int8Tile& t) {
    tile_of_rows<kFirst, kP>(t, kR);
  }

  template <bool kFirst, int kP>
  [[gnu::noinline]] static void tile_of_rows(const Int8Tile& t, int64_t rows) {
    const Cut cut(t);
    if constexpr (kFirst) look_up<kP>(t, cut);
    alignas(kLineBytes) int32_t sums[2][kP][kRows * kPanel];
    Tiles tiles(rows);
    constexpr std::make_integer_sequence<int, kP> kEachPanel;
    // sums[i]: of a group's values, or of their further bits
    const int64_t times = has_more_bits<kP>(t) ? 2 : 1;
    const auto multiply = [&]<int kSum>(int64_t i) __attribute__((always_inline)) {
      const int64_t g = i / times;
      const std::byte* const weights = t.unpacked + i % times * kMostTiles * kTileBytes;
      for_each(kEachPanel, [&]<int kI>() { tiles.template zero<kSum + kI>(); });
      for (int64_t step = g * cut.steps; step < (g + 1) * cut.steps; ++step) {
        tiles.template load<4>(t.x + step * cut.tile_k() / kTileK * kTileK * rows);
        for_each(kEachPanel, [&]<int kI>() {
          tiles.template load<6 + kI>(weights + kI * kUnpackedBytes + step * kTileBytes);
          tiles.template dot_int8<kSum + kI, 4, 6 + kI>();
        });
      }
      for_each(kEachPanel, [&]<int kI>() { tiles.template store<kSum + kI>(sums[kSum / 2][kI]); });
    };
    const auto join = [&](int64_t i) {
      for (int p = 0; p < kP; ++p)
        Vectors::template join<0, true>(t, i / times, p, i % times != 0, false, [&](auto joined) {
          for (int64_t r = 0; r < rows; ++r) {
            float* const total = reinterpret_cast<float*>(t.sums) + p * t.panel_stride + r * kPanel;
            I::store(total, joined(I::load(total), I::load_int(sums[i % 2][p] + r * kPanel), r));
          }
        });
    };
    for (int p = 0; p < kP; ++p)
      if (t.first) std::fill_n(reinterpret_cast<float*>(t.sums) + p * t.panel_stride, rows * kPanel, 0.0f);
    // the sums of a group leave while those of the next one are made
    for (int64_t i = 0; i < cut.groups * times; ++i) {
      i % 2 == 0 ? multiply.template operator()<0>(i) : multiply.template operator()<2>(i);
      if (i > 0) join(i - 1);
    }
    join(cut.groups * times - 1);
  }

  template <bool kFirst, int kP, size_t... kR>
  static constexpr std::array<Int8TileFn, kRows> table(std::index_sequence<kR...>) {
    return {tile<kFirst, kR + 1, kP>...};
  }
  template <bool kFirst>
  static Int8TileFn tile_with(int64_t rows, int64_t panels) {
    using Indices = std::make_index_sequence<kRows>;
    static constexpr std::array<std::array<Int8TileFn, kRows>, 2> kTiles{table<kFirst, 1>(Indices()),
                                                                         table<kFirst, kPanels>(Indices())};
    return kTiles[panels > 1][static_cast<size_t>(rows - 1)];
  }
  static bool unpacks(int64_t, int64_t) { return true; }
  static Int8TileFn tile_of(int64_t rows, int64_t panels, bool first, int64_t) {
    return first ? tile_with<true>(rows, panels) : tile_with<false>(rows, panels);
  }
  static int64_t panels_at_once(int64_t, int64_t) { return kPanels; }
};

constexpr int64_t kFewGroupRows = 8;  // whose products wait for memory on vectors too

template <typename I, typename Tiles, typename Format>
void matmul_group_tiles(const MatmulArgs& args, const Team& team) {
  if (args.rows <= kFewGroupRows || args.group < kTileK) {
    matmul_groups<I, Format>(args, team);
  } else {
    matmul_int8<I, Format, GroupTileProducts<I, Tiles, Format>>(args, team);
  }
  end_streams<I>(args);
}

}  // namespace
}  // namespace ingot
