// Products of weights that keep a checkpoint's codes: groups of columns have float16 scales. Codes of two to four bits
// (w2t, w3t, w4t, w4ts) stand for values of a table, bytes (w8t, w8ts) are values. plugins/grouped.py says what they
// mean.
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

// Where registers are few, the first of several groups of rows leaves the values that it looks up to the others, and
// totals lie in memory. Where they are many, few rows look values up themselves; kMany: many rows leave them to others
// too, in groups of rows whose sums and totals fill the registers.
template <typename I, typename Stored, bool kMany = false>
struct GroupProducts {
  using Format = Stored;
  using Total = float;
  static constexpr bool kShift = Format::kValues > 1, kBytes = Format::kBits == 8, kMore = Format::kBits == 4;
  static constexpr int kLineQuads = Format::kLineK / 4, kCodeLines = Format::kCodeBytes / kLineBytes;
  static int64_t run_k(int64_t group) { return group; }
  static constexpr int kRows = [] {
    if constexpr (kMany) return I::kGroupRows;
    if constexpr (I::kRegisters >= 32 && Format::kBits == 3) return I::kGroupRows;  // unpacking takes registers, too
    return I::kCodeRows;
  }();
  static constexpr int kPanels = I::kBytePanels, kVectors = kPanel / I::kWidth;
  static constexpr bool kKeepsTotals = I::kRegisters >= 32, kLeaves = kKeepsTotals ? kMany : !kBytes;
  static constexpr int64_t kPart = kLeaves && !kKeepsTotals ? 1024 : 2048;
  static constexpr int64_t kUnpackedBytes = kLeaves ? 2 * kPart * kPanel : 0;  // the values, and their further bits
  static constexpr int64_t kBlockRows = I::kBlockRows / kRows * kRows, kBlockPanels = I::kBlockPanels;
  static constexpr bool kWholeOnce = true;
  static constexpr int kMostStreamed = Format::kBits == 2 ? 1 : 2;  // rows; more take longer than memory does

  // Runs are sums of x in this unit: what a sum of products begins at where values are biased.
  static constexpr int32_t kRunUnit = I::kValueBias == 0 ? 1 : -I::kValueBias;
  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    std::fill_n(to.runs(first), count * to.run_stride(), 0);
    round_group<I, kRows, kPart, 0>(to, first, count, x, [&to, first](int64_t row, int64_t k, const int8_t* line) {
      add_runs(to, first + row, k, line);
    });
  }
  // Those of the 64 codes from k on, to runs that were zeros.
  static void add_runs(const RoundedRows& to, int64_t row, int64_t k, const int8_t* line) {
    int16_t sums[kTileK / 8];
    const int count = sum_codes<I>(line, std::min(to.run_k, kTileK), sums);
    int32_t* const runs = to.runs(row) + (k >> std::countr_zero(static_cast<uint64_t>(to.run_k)));
    for (int i = 0; i < count; ++i) runs[i] += kRunUnit * sums[i];
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
    if (kMore && (panel_has_more_bits(t.panels[0]) || panel_has_more_bits(t.panels[kP - 1]))) {
      multiply_twice<kValues, kR, kP>(t);
    } else {
      multiply<kValues, kR, kP, false>(t);
    }
  }
  template <Values kValues, int kR, int kP>
  [[gnu::noinline]] static void multiply_twice(const Int8Tile& t) {
    if constexpr (kMore) multiply<kValues, kR, kP, true>(t);
  }

  template <Values kValues, int kR, int kP, bool kTwice>
  [[gnu::always_inline]] static inline void multiply(const Int8Tile& t) {
    const int64_t group = int64_t{1} << t.group_bits, lines = group / Format::kLineK;
    const int64_t groups = ceil_div(t.tiles * kTileK, group);
    const int64_t next_step = kLineQuads * t.next_step / kCodeLines;  // of a line of codes
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
    // whether the values that are left to others are without their shifts
    static constexpr bool kMayShift = kMany && kShift && !kBytes && !kTwice && (kValues == kLeft || kValues == kFound);
    bool shifted = false;
    if constexpr (kMayShift) {
      std::byte& said = t.unpacked[kUnpackedBytes / 2];  // no panel has further bits to leave there
      if constexpr (kValues == kLeft) {
        shifted = true;
        for (int p = 0; p < kP; ++p) shifted = shifted && shifts_in_bytes(t, p, groups);
        said = std::byte{shifted};
      }
      shifted = said != std::byte{0};
    }
    // few rows of one panel read codes once, one after the other
    static constexpr bool kStreams =
        (kValues == kLookedUp || kValues == kStored) && kR <= kRowsOfStreams<I, kMostStreamed> && kP == 1;
    static constexpr int64_t kGroupBytes = kPanel * Format::kValues * static_cast<int64_t>(sizeof(uint16_t));
    const int8_t* x = t.x;
    [[maybe_unused]] bool more = false;  // whether the further bits are multiplied
    for (int64_t g = 0; g < groups; g += kTwice && more ? 0 : 1) {
      typename I::Sum sum[kR][kP];
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
        sum[r][p] = I::set_sum(I::kValueBias == 0 ? 0 : t.runs[r * t.run_stride + g]);
      });
      [[maybe_unused]] typename I::Weights shift[kP];
      if constexpr (kMayShift && kValues == kLeft) {
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) shift[p] = shifted ? I::spread_bytes(shift_at(t, p, g)) : typename I::Weights{};
      }
#pragma GCC unroll 2
      for (int64_t l = 0; l < lines; ++l, x += Format::kLineK * kR) {
        if constexpr (kStreams)  // before lines of upper bits are read out of turn
          for (int i = 0; i < kCodeLines; ++i) prefetch_codes_once<I, kR>(line[0] + i * kLineBytes, g * kGroupBytes);
        for_each(std::make_integer_sequence<int, kLineQuads>(), [&]<int q>() __attribute__((always_inline)) {
          typename I::Weights weights[kP];
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) {
            if constexpr (kValues == kFound) {
              weights[p] = I::load_weights(line[p] + q * kLineBytes);
            } else {
              if constexpr (kBytes) {
                weights[p] = I::load_values(line[p] + q * kLineBytes);
              } else {
                weights[p] = I::template look_up<Format::kBits, q>(line[p], table[p]);
              }
              if constexpr (kMayShift && kValues == kLeft) weights[p] = I::sub_bytes(weights[p], shift[p]);
              if constexpr (kValues == kLeft) I::store_weights(to[p] + q * kLineBytes, weights[p]);
            }
          }
          each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
            I::dot_values(sum[r][p], weights[p], I::load_x(x + (q * kR + r) * 4));
          });
        });
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) {
#pragma GCC unroll 3
          for (int i = 0; i < kCodeLines; ++i) {
            if constexpr (!kStreams) {
              if constexpr (kValues == kLookedUp || kValues == kStored) prefetch_panel<I, kR>(line[p] + i * kLineBytes);
              I::prefetch_far(next[p]);
            }
            next[p] += next_step;
          }
          line[p] += kValues == kFound ? kLineQuads * kLineBytes : Format::kCodeBytes;
          to[p] += kLineQuads * kLineBytes;
        }
      }
      if constexpr (kStreams) prefetch_beside_codes<I, kR>(line[0], g * kGroupBytes);
      for_each(std::make_integer_sequence<int, kVectors>(), [&]<int kVector>() __attribute__((always_inline)) {
        for_each(std::make_integer_sequence<int, kP>(), [&]<int p>() __attribute__((always_inline)) {
          join<kVector * I::kWidth, kTwice>(t, g, p, more, shifted, [&](auto joined) __attribute__((always_inline)) {
            for_each(std::make_integer_sequence<int, kR>(), [&]<int r>() __attribute__((always_inline)) {
              const auto s = I::template sum_floats<kVector>(sum[r][p]);
              if constexpr (kKeepsTotals) {
                total[r][p] = joined(total[r][p], s, r);
              } else {
                float* const to = totals + p * t.panel_stride + r * kPanel + kVector * I::kWidth;
                I::store(to, joined(I::load(to), s, r));
              }
            });
          });
        });
      });
      if constexpr (kTwice) {
        more = !more;
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p) {
          table[p] = I::product_table(more ? panel_more_bits(t.panels[p]) : panel_table(t.panels[p]));
          if (more && kValues != kFound) line[p] -= lines * Format::kCodeBytes;
        }
        if (more) x -= group * kR;
      }
    }
    if constexpr (kKeepsTotals)
      each<kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
        I::store(totals + p * t.panel_stride + r * kPanel, total[r][p]);
      });
  }

  // The scales of a group in a panel, float16; then its shifts, if it has any.
  static const uint16_t* numbers_of(const Int8Tile& t, int64_t group, int panel) {
    return reinterpret_cast<const uint16_t*>(t.multipliers[panel]) + group * kPanel * Format::kValues;
  }

  // How sums of a group join the totals, columns from kColumn on: each(f) of the one way that this panel takes,
  // f(total, sum, row) being the new total. more: the sums are those of the further bits. shifted: of values without
  // their shifts.
  template <int64_t kColumn, bool kTwice, typename Each>
  [[gnu::always_inline]] static inline void join(const Int8Tile& t, int64_t group, int panel, bool more, bool shifted,
                                                 const Each& each) {
    using V = typename I::V;
    const uint16_t* const numbers = numbers_of(t, group, panel);
    const V scale = I::load_f16(numbers + kColumn);
    if constexpr (kTwice) {
      if (more) {
        const V unit = I::mul(scale, I::set1(kMoreUnit));
        return each([&](V total, V s, int64_t) __attribute__((always_inline)) { return I::fma(s, unit, total); });
      }
    }
    const auto scaled = [&](V total, V s, int64_t) __attribute__((always_inline)) { return I::fma(s, scale, total); };
    if constexpr (kShift) {
      if (shifted) return each(scaled);
      // over the unit of runs, a power of two: the products with runs have the bits of those with sums of x
      constexpr float kUnit = 1.0f / kRunUnit;
      const bool offset = panel_has_offsets(t.panels[panel]);
      const V shift = I::mul(I::load_f16(numbers + kPanel + kColumn), I::set1(offset ? kUnit : -kUnit));
      const auto run = [&](int64_t row) __attribute__((always_inline)) {
        return I::template sum_floats<0>(I::set_sum(t.runs[row * t.run_stride + group]));
      };
      if (offset)
        return each([&](V total, V s, int64_t row)
                        __attribute__((always_inline)) { return I::fma(shift, run(row), I::fma(s, scale, total)); });
      return each([&](V total, V s, int64_t row)
                      __attribute__((always_inline)) { return I::fma(I::fma(shift, run(row), s), scale, total); });
    }
    each(scaled);
  }

  static typename I::V shift_at(const Int8Tile& t, int panel, int64_t group)
    requires kMany
  {
    return I::load_f16(numbers_of(t, group, panel) + kPanel);
  }
  // Whether values of a panel can be bytes without their shifts: zero points that are whole numbers, of so many groups.
  // Sums of a group, less than 2^24, are then exact with or without them, and so the same float32.
  static bool shifts_in_bytes(const Int8Tile& t, int panel, int64_t groups)
    requires kMany
  {
    if (panel_has_offsets(t.panels[panel])) return false;
    const auto whole = I::set1(1.5f * (1 << 23));
    auto rest = I::zero(), highest = I::set1(-kLargest), lowest = highest;
    for (int64_t g = 0; g < groups; ++g) {
      const auto shift = shift_at(t, panel, g);
      rest = I::max_abs(rest, I::sub(I::sub(I::add(shift, whole), whole), shift));
      highest = I::max(highest, shift);
      lowest = I::max(lowest, I::sub(I::zero(), shift));
    }
    const auto [least, most] = std::minmax_element(panel_table(t.panels[panel]), panel_table(t.panels[panel]) + 16);
    return I::reduce_max(rest) == 0.0f && *least - I::reduce_max(highest) >= -128.0f &&
           *most + I::reduce_max(lowest) <= 127.0f;
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
    constexpr Values kAlone = kBytes ? kStored : kLookedUp;
    if constexpr (kLeaves)
      if (groups > 1 && unpacks(panels, groups))
        return first ? tile_with<kLeft, kLeast, kPanels>(rows) : tile_with<kFound, kLeast, kPanels>(rows);
    return panels > 1 ? tile_with<kAlone, 1, kPanels>(rows) : tile_with<kAlone, 1, 1>(rows);
  }
  static int64_t panels_at_once(int64_t rows, int64_t groups) {
    return streams_grouped_codes<I, kMostStreamed>(rows, groups) ? 1 : kPanels;
  }
};

template <typename I, typename Format>
void matmul_groups(const MatmulArgs& args, const Team& team) {
  if constexpr (GroupVector<I>)
    if (args.rows > 2 * I::kGroupRows) return matmul_int8<I, Format, GroupProducts<I, Format, true>>(args, team);
  matmul_int8<I, Format, GroupProducts<I, Format>>(args, team);
}

// With float rows: what codes stand for, as float32 lines.
template <typename I, typename Format>
struct GroupedWeight {
  using Stream = PanelF32;
  using First = Stream;
  using Blocked = PanelF32;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = INT64_MAX, kStreamPart = kBlockedK;
  static constexpr int64_t kStreamBytes = kBlockedK * kLineBytes, kBlockedBytes = 0;
  static constexpr bool kShift = Format::kValues > 1, kBytes = Format::kBits == 8, kMore = Format::kBits == 4;
  static constexpr int kLineQuads = Format::kLineK / 4;
  Format format;

  template <typename Args>
  explicit GroupedWeight(const Args& args) : format(args) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at); }
  static int64_t stored_bytes(int64_t part) { return code_bytes<Format>(tiles_of(part)); }
  static const std::byte* beside(const std::byte*, int64_t) { return nullptr; }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

  // The lines of `part` values of k from `at` on, which begins a group.
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t part, std::byte* to) const {
    return kMore && panel_has_more_bits(panel) ? lines_of<kMore>(panel, at, part, to)
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
      alignas(kLineBytes) std::byte looked_up[kLineQuads * kLineBytes], rest[kLineQuads * kLineBytes];
      const std::byte* const values = kBytes ? codes : looked_up;
      for_each(std::make_integer_sequence<int, kBytes ? 0 : kLineQuads>(), [&]<int q>() __attribute__((always_inline)) {
        I::store_weights(looked_up + q * kLineBytes, I::template look_up<Format::kBits, q>(codes, table));
        if constexpr (kTwice)
          I::store_weights(rest + q * kLineBytes, I::template look_up<Format::kBits, q>(codes, more));
      });
      const auto* numbers = reinterpret_cast<const uint16_t*>(format.multipliers(panel, k));
      for (int64_t i = 0; i < kPanel; i += I::kWidth) {
        const auto scale = I::load_f16(numbers + i), shift = I::load_f16(numbers + (kShift ? kPanel : 0) + i);
        const auto store = [&]<int kByte>(int64_t q) __attribute__((always_inline)) {
          const int64_t quads = q * kLineBytes + i * 4;
          auto v = I::template load_quads<kByte>(values + quads);
          if constexpr (kTwice) v = I::fma(I::template load_quads<kByte>(rest + quads), I::set1(kMoreUnit), v);
          if (kShift && !offset) v = I::sub(v, shift);
          v = I::mul(v, scale);
          if (kShift && offset) v = I::add(v, shift);
          I::store(floats + (q * 4 + kByte) * kPanel + i, v);
        };
        for (int64_t q = 0; q < kLineQuads; ++q)
          for_each(std::make_integer_sequence<int, 4>(),
                   [&]<int kByte>() __attribute__((always_inline)) { store.template operator()<kByte>(q); });
      }
    }
    return to;
  }
};

}  // namespace
}  // namespace ingot
