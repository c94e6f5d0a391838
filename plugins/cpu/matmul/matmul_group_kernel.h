// Products of weights that keep a checkpoint's codes: groups of columns have float16 scales. Codes of four bits (w4t,
// w4ts) stand for values of a table, bytes (w8t, w8ts) are values. plugins/grouped.py says what they mean.
//
// Rows that are rounded to int8: the sum of a group is exact in int32, then it joins the others in float32 by one fma
// (with a shift two), groups ascending. So every blocking, instruction set and number of rows gives the same bits.
// Where a panel's table has further eight bits, every group is multiplied twice, by the values and by those bits: the
// second sum joins with 2^-8 of the scale. A panel without them that is multiplied beside such a one adds zeros.
// Floors: N * K / 2 bytes and those of the scales over the bandwidth of memory. Per line of 128 codes, which with
// VPDPBUSD cost two operations to unpack, two to look up and two for each row, a group adds three or four for each row.
#pragma once

#include "matmul/matmul_int8_kernel.h"
#include "matmul/matmul_kernel.h"

namespace ingot {
namespace {

// Where registers are few, the first of several groups of rows leaves the values that it looks up to the others. Else
// each looks them up, and totals stay in registers, as far as these go (see CodeProducts).
template <typename I, typename Stored>
struct GroupProducts {
  using Format = Stored;
  using Total = float;
  static constexpr bool kShift = Format::kValues > 1, kBytes = Format::kBits == 8;
  static int64_t run_k(int64_t group) { return group; }
  static constexpr int kRows = I::kCodeRows, kPanels = I::kBytePanels, kVectors = kPanel / I::kWidth;
  static constexpr bool kKeepsTotals = I::kRegisters >= 32, kLeaves = !kKeepsTotals && !kBytes;
  static constexpr int64_t kPart = kKeepsTotals ? 2048 : 1024;
  static constexpr int64_t kUnpackedBytes = kLeaves ? 2 * kPart * kPanel : 0;  // the values, and their further bits
  static constexpr int64_t kBlockRows = I::kBlockRows / kRows * kRows, kBlockPanels = I::kBlockPanels;
  static constexpr bool kWholeOnce = true;

  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    constexpr int64_t kStep = RoundedRows::kShortestRun;
    std::fill_n(to.runs(first), count * to.run_stride(), 0);
    round_group<I, kRows, kPart, 0>(to, first, count, x, [&to, first](int64_t row, int64_t k, const int8_t* line) {
      for (int64_t i = 0; i < kTileK; i += kStep)
        to.runs(first + row)[(k + i) / to.run_k] += std::accumulate(line + i, line + i + kStep, int32_t{0});
    });
  }

  // f<r, p>() one by one: constants find their sums in registers.
  template <int kR, int kP, typename F>
  [[gnu::always_inline]] static inline void each(F f) {
    for_each(std::make_integer_sequence<int, kR * kP>(),
             [f]<int kI>() __attribute__((always_inline)) { f.template operator()<kI / kP, kI % kP>(); });
  }

  enum Values {
    kLookedUp,
    kLeft,
    kFound,
    kStored
  };  // looked up for these rows alone, or for others too; left by the first ones; as they lie in panels

  template <Values kValues, int kR, int kP>
  static void tile(const Int8Tile& t) {
    if (!kBytes && (panel_has_more_bits(t.panels[0]) || panel_has_more_bits(t.panels[kP - 1]))) {
      multiply_twice<kValues, kR, kP>(t);
    } else {
      multiply<kValues, kR, kP, false>(t);
    }
  }
  template <Values kValues, int kR, int kP>
  [[gnu::noinline]] static void multiply_twice(const Int8Tile& t) {
    if constexpr (!kBytes) multiply<kValues, kR, kP, true>(t);
  }

  template <Values kValues, int kR, int kP, bool kTwice>
  [[gnu::always_inline]] static inline void multiply(const Int8Tile& t) {
    const int64_t group = int64_t{1} << t.group_bits, lines = group / Format::kLineK;
    const int64_t groups = ceil_div(t.tiles * kTileK, group);
    const int64_t next_step = (kBytes ? 1 : 2) * t.next_step;  // of a line of codes
    float* const totals = reinterpret_cast<float*>(t.sums);
    typename I::Table table[kP];
    const std::byte *line[kP], *next[kP];
    std::byte* to[kP];
    typename I::V total[kKeepsTotals ? kR : 1][kP];
    for (int p = 0; p < kP; ++p) {
      if (t.first) std::fill_n(totals + p * t.panel_stride, kR * kPanel, 0.0f);
      if constexpr (!kBytes) table[p] = I::product_table(panel_table(t.panels[p]));
      line[p] = t.lines[p];
      next[p] = t.next[p];
      to[p] = t.unpacked + p * kUnpackedBytes;
    }
    if constexpr (kKeepsTotals)
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
        total[r][p] = I::load(totals + p * t.panel_stride + r * kPanel);
      });
    const int8_t* x = t.x;
    [[maybe_unused]] bool more = false;  // whether the further bits are multiplied
    for (int64_t g = 0; g < groups; g += kTwice && more ? 0 : 1) {
      typename I::Sum sum[kR][kP];
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
        sum[r][p] = I::set_sum(-I::kValueBias * t.runs[r * t.run_stride + g]);
      });
#pragma GCC unroll 2
      for (int64_t l = 0; l < lines; ++l, x += Format::kLineK * kR) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          typename I::Weights weights[kP];
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) {
            if constexpr (kValues == kFound) {
              weights[p] = I::load_weights(line[p] + half * kLineBytes);
            } else if constexpr (kValues == kStored) {
              weights[p] = I::load_values(line[p] + half * kLineBytes);
            } else {
              weights[p] = I::look_up(line[p], half == 1, table[p]);
              if constexpr (kValues == kLeft) I::store_weights(to[p] + half * kLineBytes, weights[p]);
            }
          }
          each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
            I::dot_values(sum[r][p], weights[p], I::load_x(x + (half * kR + r) * 4));
          });
        }
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) {
          if constexpr (kValues == kLookedUp || kValues == kStored) prefetch_panel<I, kR>(line[p]);
          I::prefetch_far(next[p]);
          next[p] += next_step;
          if constexpr (kValues == kStored) {
            prefetch_panel<I, kR>(line[p] + kLineBytes);
            I::prefetch_far(next[p]);
            next[p] += next_step;
          }
          line[p] += kValues == kFound || kValues == kStored ? 2 * kLineBytes : kLineBytes;
          to[p] += 2 * kLineBytes;
        }
      }
      for_each(std::make_integer_sequence<int, kVectors>(), [&]<int kVector>() __attribute__((always_inline)) {
        each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
          const auto s = I::template sum_floats<kVector>(sum[r][p]);
          if constexpr (kKeepsTotals) {
            total[r][p] = with_group<0, kTwice>(total[r][p], s, t, g, p, r, more);
          } else {
            add_group<kVector * I::kWidth, kTwice>(s, t, g, p, r, more);
          }
        });
      });
      if constexpr (kTwice) {
        more = !more;
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) {
          table[p] = I::product_table(more ? panel_more_bits(t.panels[p]) : panel_table(t.panels[p]));
          if (more && kValues != kFound) line[p] -= lines * kLineBytes;
        }
        if (more) x -= group * kR;
      }
    }
    if constexpr (kKeepsTotals)
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
        I::store(totals + p * t.panel_stride + r * kPanel, total[r][p]);
      });
  }

  // A total that a group's sum joins: columns from kColumn on. more: the sum is that of the further bits.
  template <int64_t kColumn, bool kTwice>
  [[gnu::always_inline]] static inline typename I::V with_group(typename I::V total, typename I::V s, const Int8Tile& t,
                                                                int64_t group, int panel, int64_t row, bool more) {
    using V = typename I::V;
    const auto* numbers = reinterpret_cast<const uint16_t*>(t.multipliers[panel]) + group * kPanel * Format::kValues;
    const V scale = I::load_f16(numbers + kColumn);
    if constexpr (kTwice)
      if (more) return I::fma(s, I::mul(scale, I::set1(kMoreUnit)), total);
    if constexpr (kShift) {
      const V shift = I::load_f16(numbers + kPanel + kColumn);
      const float all = static_cast<float>(t.runs[row * t.run_stride + group]);
      const bool offset = panel_has_offsets(t.panels[panel]);
      if (!offset) s = I::fma(shift, I::set1(-all), s);
      total = I::fma(s, scale, total);
      if (offset) total = I::fma(shift, I::set1(all), total);
    } else {
      total = I::fma(s, scale, total);
    }
    return total;
  }
  // The same where totals lie in memory.
  template <int64_t kColumn, bool kTwice>
  [[gnu::always_inline]] static inline void add_group(typename I::V s, const Int8Tile& t, int64_t group, int panel,
                                                      int64_t row, bool more) {
    float* const to = reinterpret_cast<float*>(t.sums) + panel * t.panel_stride + row * kPanel + kColumn;
    I::store(to, with_group<kColumn, kTwice>(I::load(to), s, t, group, panel, row, more));
  }

  // Tiles of kLeast rows and more: groups of rows are of one size, so that one of several is no smaller than that.
  static constexpr int kLeast = kRows / 2;
  template <Values kValues, int kFirst, int kP, size_t... kR>
  static constexpr std::array<Int8TileFn, sizeof...(kR)> table(std::index_sequence<kR...>) {
    return {tile<kValues, kFirst + kR, kP>...};
  }
  template <Values kValues, int kFirst, int kP>
  static Int8TileFn tile_with(int64_t rows) {
    static constexpr auto kTiles = table<kValues, kFirst, kP>(std::make_index_sequence<kRows - kFirst + 1>());
    return kTiles[static_cast<size_t>(rows - kFirst)];
  }
  // Each group of rows looks up the last panel of an odd number for itself: tiles of its own would save little.
  static bool unpacks(int64_t panels, int64_t) { return kLeaves && panels == kPanels; }
  static Int8TileFn tile_of(int64_t rows, int64_t panels, bool first, int64_t groups) {
    if constexpr (kBytes) return panels > 1 ? tile_with<kStored, 1, kPanels>(rows) : tile_with<kStored, 1, 1>(rows);
    if constexpr (kLeaves)
      if (groups > 1 && unpacks(panels, groups))
        return first ? tile_with<kLeft, kLeast, kPanels>(rows) : tile_with<kFound, kLeast, kPanels>(rows);
    if constexpr (!kBytes)
      return panels > 1 ? tile_with<kLookedUp, 1, kPanels>(rows) : tile_with<kLookedUp, 1, 1>(rows);
  }
  static int64_t panels_at_once(int64_t rows) { return rows > 1 ? kPanels : 1; }  // see CodeProducts
};

template <typename I, typename Format>
void matmul_groups(const MatmulArgs& args, const Team& team) {
  matmul_int8<I, Format, GroupProducts<I, Format>>(args, team);
}

// With float rows: what codes stand for, as float32 lines.
template <typename I, typename Format>
struct GroupedWeight {
  using Stream = PanelF32;
  using Blocked = PanelF32;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = INT64_MAX, kStreamPart = kBlockedK;
  static constexpr int64_t kStreamBytes = kBlockedK * kLineBytes, kBlockedBytes = 0;
  static constexpr bool kShift = Format::kValues > 1, kBytes = Format::kBits == 8;
  Format format;

  template <typename Args>
  explicit GroupedWeight(const Args& args) : format(args) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at); }
  static int64_t stored_bytes(int64_t part) { return tiles_of(part) * kTileBytes / Format::kTiles; }
  static const float* scales(const std::byte*, int64_t) { return nullptr; }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

  // The lines of `part` values of k from `at` on, which begins a group.
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t part, std::byte* to) const {
    return !kBytes && panel_has_more_bits(panel) ? lines_of<!kBytes>(panel, at, part, to)
                                                 : lines_of<false>(panel, at, part, to);
  }

 private:
  template <bool kTwice>
  const std::byte* lines_of(const std::byte* panel, int64_t at, int64_t part, std::byte* to) const {
    constexpr int64_t kLineK = Format::kLineK;
    [[maybe_unused]] const auto table = I::table(panel_table(panel)), more = I::table(panel_more_bits(panel));
    const bool offset = panel_has_offsets(panel);
    const std::byte* codes = stored(panel, at);
    float* floats = reinterpret_cast<float*>(to);
    for (int64_t k = at; k < at + part; k += kLineK, codes += Format::kCodeBytes, floats += kLineK * kPanel) {
      alignas(kLineBytes) std::byte looked_up[2 * kLineBytes], rest[2 * kLineBytes];
      const std::byte* const values = kBytes ? codes : looked_up;
      if constexpr (!kBytes) {
        I::store_weights(looked_up, I::look_up(codes, false, table));
        I::store_weights(looked_up + kLineBytes, I::look_up(codes, true, table));
      }
      if constexpr (kTwice) {
        I::store_weights(rest, I::look_up(codes, false, more));
        I::store_weights(rest + kLineBytes, I::look_up(codes, true, more));
      }
      const auto* numbers = reinterpret_cast<const uint16_t*>(format.multipliers(panel, k));
      for (int64_t i = 0; i < kPanel; i += I::kWidth) {
        const auto scale = I::load_f16(numbers + i), shift = I::load_f16(numbers + (kShift ? kPanel : 0) + i);
        const auto store = [&]<int kByte>(int64_t half) __attribute__((always_inline)) {
          const int64_t quads = half * kLineBytes + i * 4;
          auto v = I::template load_quads<kByte>(values + quads);
          if constexpr (kTwice) v = I::fma(I::template load_quads<kByte>(rest + quads), I::set1(kMoreUnit), v);
          if (kShift && !offset) v = I::sub(v, shift);
          v = I::mul(v, scale);
          if (kShift && offset) v = I::add(v, shift);
          I::store(floats + (half * 4 + kByte) * kPanel + i, v);
        };
        for (int64_t half = 0; half < 2; ++half)
          for_each(std::make_integer_sequence<int, 4>(),
                   [&]<int kByte>() __attribute__((always_inline)) { store.template operator()<kByte>(half); });
      }
    }
    return to;
  }
};

}  // namespace
}  // namespace ingot
