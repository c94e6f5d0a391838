// Products of quantised weights with rows that are rounded to int8 first: exact sums in int32, so that every blocking,
// instruction set and number of rows gives the same bits. plugins/ops/matmul.py and plugins/quantised.py say what they
// mean.
//
// Floors: N * K bytes (w8) or half of that (w4) over the bandwidth of memory. AVX2 adds up 32 products in two
// operations for int4 and in four for int8, where an fma makes 8: at most four times and twice the peak of fma.
// VPDPBUSD adds up 64 in one.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "matmul/matmul_parts.h"
#include "matmul/quantised.h"
#include "matmul/rounded_rows.h"

namespace ingot {
namespace {

// A part of K of a group of rows and a few panels: sums[panel][row][16] += products.
struct Int8Tile {
  const int8_t* x;                  // codes
  const int32_t *runs, *are_short;  // of rows
  int64_t run_stride;
  const std::byte* const* panels;
  bool first;  // whether their sums begin
  const std::byte* const* lines;
  const int8_t* const* multipliers;
  int group_bits;       // its binary logarithm
  int64_t tiles;        // of 64 k
  std::byte* unpacked;  // where the first group of rows leaves what it unpacks
  int32_t* sums;
  int64_t panel_stride;
  const std::byte* const* next;  // to fetch meanwhile, from each pointer on
  int64_t next_step;             // bytes per line
};
using Int8TileFn = void (*)(const Int8Tile&);

// Products of whole bytes, added up in int32. The first group of rows unpacks int4 while it multiplies, for the others
// too.
template <typename I, typename Format>
struct ByteProducts {
  static constexpr bool kUnpacks = Format::kTiles != 1, kWholeOnce = !kUnpacks;
  static constexpr int kRows = I::kByteRows, kPanels = I::kBytePanels;
  static constexpr int64_t kPart = 1024, kUnpackedBytes = kUnpacks ? kPart * kPanel : 0;  // of a panel's part
  static constexpr int64_t kBlockRows = I::kBlockRows / kRows * kRows, kBlockPanels = I::kBlockPanels;
  using Total = int32_t;
  static int64_t run_k(int64_t) { return RoundedRows::kShortestRun; }  // none is used
  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    round_group<I, kRows, kPart, I::kFlipX>(to, first, count, x, [](int64_t, int64_t, const int8_t*) {});
  }

  template <int kR, int kP>
  using Sums = typename I::Sum[kR][kP];
  template <int kP>
  using Weights = typename I::Weights[kP];

  // f<r, p>() of rows [kBegin, kEnd) and all panels, one by one: constants find their sums in registers.
  template <int kBegin, int kEnd, int kP, typename F>
  [[gnu::always_inline]] static inline void each(F f) {
    if constexpr (kBegin < kEnd)
      for_each(std::make_integer_sequence<int, (kEnd - kBegin) * kP>(),
               [f]<int kI>() __attribute__((always_inline)) { f.template operator()<kBegin + kI / kP, kI % kP>(); });
  }
  template <int kR, int kP>
  [[gnu::always_inline]] static inline void begin(const Int8Tile& t, Sums<kR, kP>& sum) {
    each<0, kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
      sum[r][p] =
          t.first ? I::start_sum(panel_sums(t.panels[p])) : I::load_sum(t.sums + p * t.panel_stride + r * kPanel);
    });
  }
  template <int kR, int kP>
  [[gnu::always_inline]] static inline void end(const Int8Tile& t, const Sums<kR, kP>& sum) {
    each<0, kR, kP>([&]<int r, int p>() __attribute__((always_inline)) {
      I::store_sum(t.sums + p * t.panel_stride + r * kPanel, sum[r][p]);
    });
  }
  // A line of each panel times rows [kBegin, kEnd).
  template <int kBegin, int kEnd, int kR, int kP>
  [[gnu::always_inline]] static inline void dots(Sums<kR, kP>& sum, const Weights<kP>& weights, const int8_t* x) {
    each<kBegin, kEnd, kP>([&]<int r, int p>() __attribute__((always_inline)) {
      I::dot_bytes(sum[r][p], weights[p], I::load_x(x + r * 4));
    });
  }

  // kMany: the weights have come already, and those that follow are fetched.
  template <bool kMany, int kR, int kP>
  static void tile(const Int8Tile& t) {
    Sums<kR, kP> sum;
    begin<kR, kP>(t, sum);
    const std::byte *line[kP], *next[kP];
    for (int p = 0; p < kP; ++p) {
      line[p] = t.lines[p];
      next[p] = t.next[p];
    }
    const int8_t* x = t.x;
    for (int64_t i = 0; i < t.tiles * kTileLines; ++i, x += 4 * kR) {
      Weights<kP> weights;
#pragma GCC unroll 2
      for (int p = 0; p < kP; ++p) {
        weights[p] = I::load_weights(line[p]);
        if constexpr (kMany) {
          I::prefetch_far(next[p]);
        } else {
          prefetch_streamed_codes<I, kR>(line[p]);
        }
        line[p] += kLineBytes;
        next[p] += t.next_step;
      }
      dots<0, kR, kR, kP>(sum, weights, x);
    }
    end<kR, kP>(t, sum);
  }

  // The same of int4 for the first group of rows. Weights are made amid the products of those before them: made after
  // these, they would keep their own products waiting.
  template <int kR, int kP>
  static void unpack_tile(const Int8Tile& t) {
    constexpr int kMiddle = kR / 2;
    Sums<kR, kP> sum;
    begin<kR, kP>(t, sum);
    const std::byte *codes[kP], *next[kP];
    std::byte* to[kP];
    for (int p = 0; p < kP; ++p) {
      codes[p] = t.lines[p];
      next[p] = t.next[p];
      to[p] = t.unpacked + p * kUnpackedBytes;
    }
    const int64_t step = 2 * t.next_step, group = int64_t{1} << t.group_bits;
    const int64_t run = group < kTileK ? kTileLines / 2 : kTileLines;  // lines of the same multipliers
    const int8_t* x = t.x;
    for (int64_t k = 0; k < t.tiles * kTileK; k += 2 * kTileK) {
      for (int64_t line = 0; line < kTileLines; line += run) {
        typename I::Multipliers low[kP], high[kP];
        Weights<kP> weights, coming;
        for (int p = 0; p < kP; ++p) {
          const auto of = [&](int64_t at) { return I::multipliers(t.multipliers[p] + (at >> t.group_bits) * kPanel); };
          low[p] = high[p] = of(k + line * 4);
          if (group < 2 * kTileK) high[p] = of(k + kTileK + line * 4);
          weights[p] = I::low_weights(codes[p], low[p]);
        }
#pragma GCC unroll 1
        for (int64_t l = 0; l < run; ++l, x += 4 * kR) {
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) {
            I::store_weights(to[p], weights[p]);
            I::prefetch_far(next[p]);
            next[p] += step;
          }
          dots<0, kMiddle, kR, kP>(sum, weights, x);
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) {
            coming[p] = I::high_weights(codes[p], high[p]);
            codes[p] += l + 1 < run ? kLineBytes : 0;  // the last line is unpacked once more, for nothing
          }
          dots<kMiddle, kR, kR, kP>(sum, weights, x);
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) {
            weights[p] = coming[p];
            I::store_weights(to[p] + kTileBytes, weights[p]);
            to[p] += kLineBytes;
          }
          dots<0, kMiddle, kR, kP>(sum, weights, x + kTileK * kR);
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) coming[p] = I::low_weights(codes[p], low[p]);
          dots<kMiddle, kR, kR, kP>(sum, weights, x + kTileK * kR);
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) weights[p] = coming[p];
        }
        for (int p = 0; p < kP; ++p) codes[p] += kLineBytes;
      }
      x += kTileK * kR;
      for (int p = 0; p < kP; ++p) to[p] += kTileBytes;
    }
    end<kR, kP>(t, sum);
  }

  // kOther: see tile_of.
  template <bool kOther, int kP, size_t... kR>
  static constexpr std::array<Int8TileFn, kRows> table(std::index_sequence<kR...>) {
    if constexpr (kUnpacks && !kOther)
      return {unpack_tile<kR + 1, kP>...};
    else
      return {tile<kOther, kR + 1, kP>...};
  }
  template <bool kOther>
  static constexpr std::array<std::array<Int8TileFn, kRows>, 2> tables() {
    using Indices = std::make_index_sequence<kRows>;
    return {table<kOther, 1>(Indices()), table<kOther, kPanels>(Indices())};
  }

  static int64_t panels_at_once(int64_t, int64_t groups) { return !kUnpacks && one_stream<I>(groups) ? 1 : kPanels; }
  // Whether the first of so many groups of rows leaves weights of so many panels at once to the others.
  static bool unpacks(int64_t, int64_t) { return kUnpacks; }
  // What multiplies a group of so many rows by one panel or kPanels. first: of so many groups.
  static Int8TileFn tile_of(int64_t rows, int64_t panels, bool first, int64_t groups) {
    static constexpr auto kFirst = tables<false>(), kOther = tables<true>();
    return ((kUnpacks ? first : groups == 1) ? kFirst : kOther)[panels > 1][static_cast<size_t>(rows - 1)];
  }
};

// Products of int4 as it is stored: sums of codes from 0 to 15 over kRun k, which are then multiplied into int32 by the
// group's multipliers. With AVX2 such a sum stays in int16, and no sum of two products saturates. A run of 128 k is one
// of whole bytes: both nibbles have the same multipliers and add up to one sum.
template <typename I, int64_t kRun>
struct CodeProducts {
  using Total = int32_t;
  static int64_t run_k(int64_t) { return kRun; }
  static constexpr int kRows = I::kCodeRows, kPanels = I::kCodePanels, kVectors = kPanel / I::kWidth;
  static constexpr bool kWholeBytes = kRun == 2 * kTileK, kWholeOnce = true;
  // Whether totals stay in registers, as far as these go: a store costs AVX-512 as much as two products.
  static constexpr bool kKeepsTotals = kWholeBytes || I::kRegisters >= 32;
  // The first of several groups of rows can leave a byte for each code to the others, where making one of a nibble
  // costs much beside its products.
  static constexpr bool kLeaves = I::kLeavesCodes && kPanels == 1;
  static constexpr int64_t kPart = kKeepsTotals ? 2048 : 1024, kUnpackedBytes = kLeaves ? kPart * kPanel : 0;
  static constexpr int64_t kBlockRows = kKeepsTotals ? 16 * kRows : 96 / kRows * kRows, kBlockPanels = 32;
  static constexpr int64_t kLines = kWholeBytes ? kTileLines : kRun / 4;

  static void round(const RoundedRows& to, int64_t first, int64_t count, const float* const* x) {
    std::fill_n(to.runs(first), count * to.run_stride(), 0);
    round_group<I, kRows, kPart, 0>(to, first, count, x, [&to, first](int64_t row, int64_t k, const int8_t* line) {
      constexpr int64_t kStep = std::min(kRun, kTileK);
      for (int64_t i = 0; i < kTileK; i += kStep)
        to.runs(first + row)[(k + i) / kRun] += I::template short_start<kStep>(line + i);
    });
  }

  enum Half { kLow, kHigh };
  template <int kR, int kP>
  using Totals = typename I::Short[kR][kP][kVectors];
  static int32_t* total_at(const Int8Tile& t, int row, int panel, int vector) {
    return t.sums + panel * t.panel_stride + row * kPanel + vector * I::kWidth;
  }

  // f<r, p, v>() one by one: constants find their sums in registers.
  template <int kR, int kP, typename F>
  [[gnu::always_inline]] static inline void each(F f) {
    for_each(std::make_integer_sequence<int, kR * kP * kVectors>(), [f]<int kI>() __attribute__((always_inline)) {
      f.template operator()<kI / (kP * kVectors), kI / kVectors % kP, kI % kVectors>();
    });
  }

  // Lines [line, line + kLines) of a block of 128 k: half kFirst of their bytes, or both.
  template <int kR, int kP, Half kFirst, int kHalves>
  [[gnu::always_inline]] static inline void run(const Int8Tile& t, int64_t block, int64_t line, Totals<kR, kP>& total) {
    // one row needs two sums: each product waits for the one before it
    constexpr int kSums = kWholeBytes && kR * kP >= 4 ? 1 : kHalves, kTotals = kWholeBytes ? 1 : kHalves;
    typename I::Short sum[kR][kP][kSums][kVectors];
    const int64_t next_step = 2 * t.next_step;
    const std::byte *at[kP], *next[kP];
    const int8_t *x[kHalves], *multipliers[kP][kTotals];
    int64_t k[kHalves];
#pragma GCC unroll 2
    for (int p = 0; p < kP; ++p) {
      at[p] = t.lines[p] + (block * kTileLines + line) * kLineBytes;
      next[p] = t.next[p] + (block * kTileLines + line) * next_step;
    }
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      k[h] = (2 * block + kFirst + h) * kTileK + line * 4;
      x[h] = t.x + k[h] * kR;
    }
#pragma GCC unroll 2
    for (int p = 0; p < kP; ++p)
#pragma GCC unroll 2
      for (int h = 0; h < kTotals; ++h) multipliers[p][h] = t.multipliers[p] + (k[h] >> t.group_bits) * kPanel;
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < kSums; ++h) {
        const auto start = I::set_short(kWholeBytes && h > 0 ? 0 : t.runs[r * t.run_stride + k[h] / kRun]);
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[r][p][h][v] = start;
      }
    const auto add_line = [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int p = 0; p < kP; ++p) {
        if constexpr (kFirst == kLow && kP == 1) prefetch_streamed_codes<I, kR>(at[p]);
        if constexpr (kFirst == kLow && kP > 1) I::prefetch_streams(at[p], next[p]);
        next[p] += next_step;
      }
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        typename I::Short codes[kP][kVectors];
#pragma GCC unroll 2
        for (int p = 0; p < kP; ++p)
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v)
            codes[p][v] = I::load_codes(at[p] + v * I::kWidth * 4, kFirst + h == kHigh);
#pragma GCC unroll 16
        for (int r = 0; r < kR; ++r) {
          const typename I::Short xr = I::load_x(x[h] + (i * kR + r) * 4);
#pragma GCC unroll 2
          for (int p = 0; p < kP; ++p) dots(sum[r][p][h % kSums], codes[p], xr);
        }
      }
#pragma GCC unroll 2
      for (int p = 0; p < kP; ++p) at[p] += kLineBytes;
    };
#pragma GCC unroll 2
    for (int64_t i = 0; i < kLines; ++i) add_line(i);
    for_each(std::make_integer_sequence<int, kTotals>(), [&]<int h>() __attribute__((always_inline)) {
      typename I::Short factors[kP][kVectors];  // made before totals are stored, which could lie over them
#pragma GCC unroll 2
      for (int p = 0; p < kP; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) factors[p][v] = I::short_multipliers(multipliers[p][h] + v * I::kWidth);
      each<kR, kP>([&]<int r, int p, int v>() __attribute__((always_inline)) {
        auto of = sum[r][p][h][v];
        if constexpr (kWholeBytes && kSums == 2) of = I::add_shorts(of, sum[r][p][1][v]);
        if constexpr (kKeepsTotals) {
          I::add_short(total[r][p][v], of, factors[p][v]);
        } else {
          int32_t* const to = total_at(t, r, p, v);
          auto stored = I::load_short(to);
          I::add_short(stored, of, factors[p][v]);
          I::store_short(to, stored);
        }
      });
    });
  }

  // Products of a line of codes with four k of a row.
  [[gnu::always_inline]] static inline void dots(typename I::Short (&sum)[kVectors],
                                                 const typename I::Short (&codes)[kVectors], typename I::Short x) {
    if constexpr (I::kLeavesCodes) {
      I::dots(sum, codes, x);
    } else {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) I::dot(sum[v], codes[v], x);
    }
  }

  // Few rows take both halves of each line at once, many one after the other, for the sake of registers.
  template <int kR, int kP>
  static void tile(const Int8Tile& t) {
    Totals<kR, kP> total;
    each<kR, kP>([&]<int r, int p, int v>() __attribute__((always_inline)) {
      if (t.first) I::store_short(total_at(t, r, p, v), I::set_short(0));
      if constexpr (kKeepsTotals) total[r][p][v] = I::load_short(total_at(t, r, p, v));
    });
    for (int64_t block = 0; block < (t.tiles + 1) / 2; ++block)
      for (int64_t line = 0; line < kTileLines; line += kLines)
        if constexpr (kWholeBytes || 4 * kR * kP * kVectors <= I::kRegisters) {
          run<kR, kP, kLow, 2>(t, block, line, total);
        } else {
          run<kR, kP, kLow, 1>(t, block, line, total);
          run<kR, kP, kHigh, 1>(t, block, line, total);
        }
    each<kR, kP>([&]<int r, int p, int v>() __attribute__((always_inline)) {
      if constexpr (kKeepsTotals) I::store_short(total_at(t, r, p, v), total[r][p][v]);
    });
  }

  // One byte for each of the codes of a part of a panel, line by line as products take them.
  static void leave(const Int8Tile& t) {
    const std::byte* from = t.lines[0];
    std::byte* to = t.unpacked;
    constexpr int64_t kStep = I::kWidth * 4;
    for (int64_t k = 0; k < t.tiles * kTileK; k += 2 * kTileK, to += kTileBytes)
      for (int64_t i = 0; i < kTileBytes; i += kStep, from += kStep, to += kStep) {
        I::store_short(reinterpret_cast<int32_t*>(to), I::load_codes(from, false));
        I::store_short(reinterpret_cast<int32_t*>(to + kTileBytes), I::load_codes(from, true));
      }
  }

  // A group of rows times codes that were left. All of a run is unrolled, because a Zen 3 makes fewer products in a
  // loop of two lines.
  template <int kR, bool kFirst>
  static void left_tile(const Int8Tile& t) {
    if constexpr (kFirst) leave(t);
    const std::byte *line = kFirst ? t.unpacked : t.lines[0], *next = t.next[0];
    const int64_t end = t.tiles * kTileK, run_stride = t.run_stride, next_bytes = t.next_step * (kRun / 4);
    const int32_t* start = t.runs;
    const int8_t *x = t.x, *const multipliers = t.multipliers[0];
    const int group_bits = t.group_bits;
    int32_t* const totals = t.sums;
    if (t.first) std::fill_n(totals, kR * kPanel, 0);
    for (int64_t k = 0; k < end; k += kRun, next += next_bytes) {
      // three lines hold what a run fetches for at least three groups of rows
#pragma GCC unroll 3
      for (int64_t i = 0; i < 3; ++i) I::prefetch_far(next + i * kLineBytes);
      typename I::Short sum[kR][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = I::set_short(start[r * run_stride]);
      ++start;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRun / 4; ++i, x += 4 * kR, line += kLineBytes) {
        typename I::Short codes[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          codes[v] = I::load_short(reinterpret_cast<const int32_t*>(line) + v * I::kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < kR; ++r) dots(sum[r], codes, I::load_x(x + r * 4));
      }
      typename I::Short factors[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        factors[v] = I::short_multipliers(multipliers + (k >> group_bits) * kPanel + v * I::kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < kR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          int32_t* const at = totals + r * kPanel + v * I::kWidth;
          auto total = I::load_short(at);
          I::add_short(total, sum[r][v], factors[v]);
          I::store_short(at, total);
        }
    }
  }

  enum Kind { kStored, kFirstLeft, kLeft };
  template <Kind kKind, int kP, size_t... kR>
  static constexpr std::array<Int8TileFn, kRows> table(std::index_sequence<kR...>) {
    if constexpr (kKind == kStored)
      return {tile<kR + 1, kP>...};
    else
      return {left_tile<kR + 1, kKind == kFirstLeft>...};
  }
  template <Kind kKind>
  static Int8TileFn tile_with(int64_t rows, int64_t panels) {
    using Indices = std::make_index_sequence<kRows>;
    static constexpr std::array<std::array<Int8TileFn, kRows>, 2> kTiles{table<kKind, 1>(Indices()),
                                                                         table<kKind, kPanels>(Indices())};
    return kTiles[panels > 1][static_cast<size_t>(rows - 1)];
  }
  static Int8TileFn tile_of(int64_t rows, int64_t panels, bool first, int64_t groups) {
    if constexpr (kLeaves)
      if (unpacks(panels, groups)) return first ? tile_with<kFirstLeft>(rows, panels) : tile_with<kLeft>(rows, panels);
    return tile_with<kStored>(rows, panels);
  }
  static bool unpacks(int64_t, int64_t groups) { return kLeaves && groups > 2; }
  // One row with long runs waits for memory, which is faster as one stream; with shorter ones, for sums of one panel.
  static int64_t panels_at_once(int64_t rows, int64_t groups) {
    constexpr bool kLongRuns = kRun >= I::kLongestRun;
    return streams_codes<I>(rows, groups) || (rows == 1 && kLongRuns) ? 1 : kPanels;
  }
};

inline size_t matmul_int8_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  return static_cast<size_t>(RoundedRows{matmul.rows, matmul.k, nullptr}.bytes());
}

// Sums of some groups of rows and some panels, a part of K after another, to [panel][row][16]. at(panel): where it
// lies. after: the panel that will probably be multiplied next, or null.
template <typename Format, typename Products, typename PanelAt>
void int8_sums(const Format& format, const RoundedRows& x, int64_t group, int64_t groups, int64_t panels,
               const PanelAt& at, const std::byte* after, int32_t* sums, std::byte* unpacked) {
  const RowGroups all{x.rows, Products::kRows};
  const int64_t row = all.first(group), stride = (all.first(group + groups) - row) * kPanel;
  const int group_bits = std::countr_zero(static_cast<uint64_t>(format.group));
  // one group of rows leaves nothing to be read again: each panel is read from its beginning to its end
  const int64_t most = groups == 1 && Products::kWholeOnce ? x.k : Products::kPart;
  const int64_t ahead = groups == 1 ? 8192 : 0;  // of the same place of the next panels
  for (int64_t k = 0; k < x.k; k += most) {
    const int64_t part = std::min(most, x.k - k), tiles = tiles_of(part);
    for (int64_t p = 0, step; p < panels; p += step) {
      step = panels - p >= Products::kPanels ? Products::panels_at_once(all.first(group + 1) - row, groups) : 1;
      const std::byte *begun[Products::kPanels], *lines[Products::kPanels], *next[Products::kPanels];
      const int8_t* multipliers[Products::kPanels];
      for (int64_t i = 0; i < step; ++i) {
        begun[i] = at(p + i);
        lines[i] = format.stored(begun[i], k);
        multipliers[i] = format.multipliers(begun[i], k);
        if (p + 2 * step <= panels) {
          next[i] = format.stored(at(p + step + i), k);
        } else {
          next[i] = k + part < x.k || after == nullptr ? format.stored(at(i), std::min(k + part, x.k - 1))
                                                       : format.stored(after + i * format.panel_bytes(), 0);
        }
        next[i] += ahead;
      }
      if (k == 0 && groups == 1 && step == 1 && reads_in_order()) read_header(begun[0], lines[0]);
      const int64_t next_bytes = code_bytes<Format>(tiles) / groups;  // while a group of rows is multiplied
      for (int64_t g = group; g < group + groups; ++g) {
        const int64_t first = all.first(g), count = all.first(g + 1) - first;
        const Int8Tile tile{.x = x.codes(first) + k * count,
                            .runs = x.runs(first) + k / x.run_k,
                            .are_short = x.are_short(first),
                            .run_stride = x.run_stride(),
                            .panels = begun,
                            .first = k == 0,
                            .lines = lines,
                            .multipliers = multipliers,
                            .group_bits = group_bits,
                            .tiles = tiles,
                            .unpacked = unpacked,
                            .sums = sums + p * stride + (first - row) * kPanel,
                            .panel_stride = stride,
                            .next = next,
                            .next_step = ceil_div(next_bytes, tiles * kTileLines)};
        Products::tile_of(count, step, g == group, groups)(tile);
        for (int64_t i = 0; i < step; ++i) {
          if (Products::unpacks(step, groups)) lines[i] = unpacked + i * Products::kUnpackedBytes;
          next[i] += next_bytes;
        }
      }
    }
  }
}

// Some groups of rows, panels [panel, panel + panels); next_panel will probably be next. scratch: sums, then unpacked
// parts.
template <typename I, typename Format, typename Products>
void int8_block(const MatmulArgs& args, const Format& format, const RoundedRows& x, int64_t group, int64_t groups,
                int64_t panel, int64_t panels, int64_t next_panel, std::byte* scratch) {
  int32_t* const sums = reinterpret_cast<int32_t*>(scratch);
  const RowGroups all{x.rows, Products::kRows};
  const int64_t row = all.first(group), rows = all.first(group + groups) - row;
  const int64_t stride = rows * kPanel, bytes = format.panel_bytes();
  int8_sums<Format, Products>(
      format, x, group, groups, panels, [&](int64_t p) { return panel_at(args, panel + p, bytes); },
      panel_at(args, std::min(next_panel, args.num_panels - 1), bytes), sums,
      scratch + panels * stride * static_cast<int64_t>(sizeof(int32_t)));
  const Int8Sums<I> scaled{{args, bytes}, x.scales()};
  epilogue<I>(args, row, rows, panel, panels, reinterpret_cast<const typename Products::Total*>(sums), stride, scaled);
}

// Few rows: every weight is read once, in order. Many rows: blocks of rows x panels.
template <typename I, typename Format, typename Products>
void matmul_int8(const MatmulArgs& args, const Team& team) {
  const BlockLimits limits = block_limits(args, Products::kRows, Products::kBlockRows, Products::kBlockPanels);
  const Format format(args);
  const OwnOrShared place(args, team);
  const RoundedRows x{args.rows, args.k, place.memory(matmul_int8_scratch(&args)), Products::run_k(args.group)};
  const RowsOfX row_of(args, team, Products::kRows);
  const RowGroups all{args.rows, Products::kRows};
  const Team::Range mine = place.share(all.count());
  for (int64_t group = mine.begin; group < mine.end; ++group) {
    const int64_t first = all.first(group), count = all.first(group + 1) - first;
    const float* rows[Products::kRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = row_of(first + r, r);
    Products::round(x, first, count, rows);
  }
  place.wait();
  const int64_t num_sums = limits.rows * limits.panels * kPanel;
  std::byte* const scratch = team.scratch(static_cast<size_t>(num_sums) * sizeof(int32_t) +
                                          static_cast<size_t>(Products::kPanels * Products::kUnpackedBytes));
  if (passes_over_panels(args, Products::kRows)) {
    const int64_t width = args.gated ? 2 : 1, at_once = std::max<int64_t>(width, Products::kPanels);
    return share_panels(args, team, at_once, format.panel_bytes(), [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; panel += at_once)
        int8_block<I, Format, Products>(args, format, x, 0, 1, panel, std::min(at_once, end - panel), panel + at_once,
                                        scratch);
    });
  }
  const Blocks blocks = cut(args, team.count, Products::kRows, limits);
  const int64_t items = blocks.count(), most = blocks.rows / Products::kRows;  // groups of a block
  for (int64_t item = team.next_of_shares(items); item < items; item = team.next_of_shares(items)) {
    const int64_t group = blocks.row_block(item) * most, panel = blocks.first_panel(item);
    int8_block<I, Format, Products>(args, format, x, group, std::min(most, all.count() - group), panel,
                                    std::min(blocks.panels, args.num_panels - panel), blocks.first_panel(item + 1),
                                    scratch);
  }
}

// f<kRun>() of the longest run of k whose products of codes may be added up in groups of so many columns.
template <typename I, typename F>
void with_run(int64_t group, F f) {
  if (group == 32) return f.template operator()<32>();
  if constexpr (I::kLongestRun == 128) {
    if (group == 128) return f.template operator()<128>();
  }
  f.template operator()<64>();
}

template <typename I>
void matmul_codes(const MatmulArgs& args, const Team& team) {
  with_run<I>(args.group, [&]<int64_t kRun>() { matmul_int8<I, W4, CodeProducts<I, kRun>>(args, team); });
}

template <typename I, typename Format>
void matmul_bytes(const MatmulArgs& args, const Team& team) {
  matmul_int8<I, Format, ByteProducts<I, Format>>(args, team);
}

// int4 as this CPU multiplies it best. With AVX-512 a line of codes takes operations that VPDPBUSD leaves room for, but
// each row a multiplication for every run. To unpack a line costs as much as seven products, once for all rows; L1 has
// room for that of short parts, so these are unpacked for fewer rows.
template <typename I>
void matmul_w4a8(const MatmulArgs& args, const Team& team) {
  with_run<I>(args.group, [&]<int64_t kRun>() {
    if constexpr (constexpr int64_t kMost = I::template kMaxCodeRows<kRun>; kMost < INT64_MAX)
      if (args.rows > (kRun == 64 && args.k <= ByteProducts<I, W4>::kPart ? kMost * 3 / 4 : kMost))
        return matmul_bytes<I, W4>(args, team);
    matmul_int8<I, W4, CodeProducts<I, kRun>>(args, team);
  });
}

}  // namespace
}  // namespace ingot
