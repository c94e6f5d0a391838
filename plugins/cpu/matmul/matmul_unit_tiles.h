// Weights whose groups have whole numbers of units (w2ks, w3k, w4ks, w5ks, w6k) times rows of int8 on tile registers
// (AMX), with the bits of matmul_unit_kernel.h: code * scale has at most 14 bits, so it is 128 * a signed byte + a
// signed byte. Both bytes have tiles of their own, which fill all 64 k whatever the groups are; the sums of a unit are
// exact in int32.
//
// Floors: two products on tiles where w4 has one, and for each unit four tiles of sums that leave them.
#pragma once

#include "matmul/matmul_unit_kernel.h"

namespace ingot {
namespace {

template <typename I, typename Tiles, typename Stored>
struct UnitTileProducts {
  using Vectors = UnitProducts<I, Stored>;
  using Format = Stored;
  using Total = float;
  using Short = typename I::Short;
  static constexpr bool kShift = Format::kValues > 1;
  static int64_t run_k(int64_t group) { return Vectors::run_k(group); }
  static constexpr int kRows = 16, kPanels = 2;
  static constexpr int64_t kPart = 1024;
  static constexpr int64_t kHalfBytes = kPart * kPanel, kUnpackedBytes = 2 * kHalfBytes;  // of lower and upper bytes
  static constexpr int64_t kBlockRows = 256, kBlockPanels = 32;
  static constexpr bool kWholeOnce = false;
  static_assert(I::kWidth == kPanel && kPart % kUnitK == 0);

  // Tiles of 64 k of all rows, one after another.
  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    std::fill_n(to.runs(first), count * to.run_stride(), 0);
    for (int64_t r = 0; r < count; ++r) {
      const auto place = [&](int64_t k) { return to.codes(first) + k * count + r * kTileK; };
      to.scales()[first + r] = round_row<I>(x[r], to.k, to.padded_k(), place);
      for (int64_t k = 0; k < to.padded_k(); k += kTileK) Vectors::store_runs(to, first + r, k, place(k));
    }
  }

  static void unpack(const Int8Tile& t, int p) {
    const int64_t unit_bytes = Format::unit_bytes(t.group_bits);
    std::byte *low = t.unpacked + p * kUnpackedBytes, *high = low + kHalfBytes;
    const std::byte *codes = t.lines[p], *next = t.next[p];
    for (int64_t k = 0; k < t.tiles * kTileK; k += Format::kLineK, codes += Format::kCodeBytes) {
      const UnitNumbers<Format> numbers(t.multipliers[p] + k / kUnitK * unit_bytes, t.group_bits);
      const auto make = [&]<int q>(Short scales) __attribute__((always_inline)) {
        Short lower, upper;
        I::template split<Format::kBias>(I::template line_codes<Format::kBits, q>(codes), scales, lower, upper);
        I::store_short(reinterpret_cast<int32_t*>(low + q * kLineBytes), lower);
        I::store_short(reinterpret_cast<int32_t*>(high + q * kLineBytes), upper);
        I::prefetch_far(next + q * t.next_step);
      };
      for_each(std::make_integer_sequence<int, kRuns<Format>>(), [&]<int kRun>() __attribute__((always_inline)) {
        const int64_t group = (k % kUnitK + kRun * kUnitRun) >> t.group_bits;
        const Short scales = I::wide_scales(numbers.scales + group * kPanel);
        for_each(std::make_integer_sequence<int, kRunQuads>(), [&]<int q>() __attribute__((always_inline)) {
          make.template operator()<kRun * kRunQuads + q>(scales);
        });
      });
      low += Format::kLineK * kPanel;
      high += Format::kLineK * kPanel;
      next += Format::kLineK / 4 * t.next_step;
    }
  }

  template <bool kFirst, int kR, int kP>
  static void tile(const Int8Tile& t) {
    tile_of_rows<kFirst, kP>(t, kR);
  }

  template <bool kFirst, int kP>
  [[gnu::noinline]] static void tile_of_rows(const Int8Tile& t, int64_t rows) {
    for (int p = 0; p < kP; ++p) {
      if (kFirst) unpack(t, p);
      if (t.first) std::fill_n(reinterpret_cast<float*>(t.sums) + p * t.panel_stride, rows * kPanel, 0.0f);
    }
    alignas(kLineBytes) int32_t sums[2][kP][kRows * kPanel];  // of lower and of upper bytes
    Tiles tiles(rows);
    constexpr std::make_integer_sequence<int, kP> kEachPanel;
    for (int64_t step = 0; step < t.tiles;) {
      const int64_t unit = step * kTileK / kUnitK, end = std::min(t.tiles, step + kUnitK / kTileK);
      for_each(kEachPanel, [&]<int p>() {
        tiles.template zero<p>();
        tiles.template zero<2 + p>();
      });
      for (; step < end; ++step) {
        tiles.template load<4>(t.x + step * kTileK * rows);
        for_each(kEachPanel, [&]<int p>() {
          const std::byte* const weights = t.unpacked + p * kUnpackedBytes + step * kTileBytes;
          tiles.template load<6>(weights);
          tiles.template dot_int8<p, 4, 6>();
          tiles.template load<7>(weights + kHalfBytes);
          tiles.template dot_int8<2 + p, 4, 7>();
        });
      }
      for_each(kEachPanel, [&]<int p>() {
        tiles.template store<p>(sums[0][p]);
        tiles.template store<2 + p>(sums[1][p]);
      });
      for (int p = 0; p < kP; ++p) join(t, unit, p, rows, sums[0][p], sums[1][p]);
    }
  }

  // The sums of a unit join the totals.
  static void join(const Int8Tile& t, int64_t unit, int p, int64_t rows, const int32_t* lower, const int32_t* upper) {
    const UnitNumbers<Format> numbers(t.multipliers[p] + unit * Format::unit_bytes(t.group_bits), t.group_bits);
    const auto scale = I::load_f16(numbers.scale),
               unit_of_offsets = I::load_f16(kShift ? numbers.offset : numbers.scale);
    const int64_t pairs = kUnitK >> (t.group_bits + 1);
    const int32_t* of_unit = t.runs + unit * pairs;
    float* total = reinterpret_cast<float*>(t.sums) + p * t.panel_stride;
    for (int64_t r = 0; r < rows; ++r, total += kPanel, lower += kPanel, upper += kPanel, of_unit += t.run_stride) {
      const Short sum = I::unsplit(I::load_short(lower), I::load_short(upper));
      auto joined = I::fma(I::short_floats(sum), scale, I::load(total));
      if constexpr (kShift) {
        Short offsets = I::set_short(0);
        for (int64_t i = 0; i < pairs; ++i)
          I::add_pairs(offsets, I::pairs(numbers.offsets + i * kPanel * 2), I::set_short(of_unit[i]));
        joined = I::fma(I::short_floats(offsets), unit_of_offsets, joined);
      }
      I::store(total, joined);
    }
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

constexpr int64_t kVectorUnitRows = 8;  // whose products wait for memory on vectors too

template <typename I, typename Tiles, typename Format>
void matmul_unit_tiles(const MatmulArgs& args, const Team& team) {
  if (args.rows <= kVectorUnitRows) {
    matmul_units<I, Format>(args, team);
  } else {
    matmul_int8<I, Format, UnitTileProducts<I, Tiles, Format>>(args, team);
  }
  end_streams<I>(args);
}

}  // namespace
}  // namespace ingot
