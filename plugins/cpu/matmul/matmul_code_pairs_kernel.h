// Products of quantised weights by the dot product of bf16, which holds every number of FP8, every int8 and every code:
// x is rounded to bf16. Up to 128 columns, those of a group if it has fewer, make two sums, of even and of odd pairs of
// k. A sum is started at 0 and fed with a pair per instruction, k ascending. Both are multiplied by the group's scale
// or multiplier and added up by fma, even pairs first, k ascending. So the blocking changes no bit, and the two pairs
// of a stored line never wait for each other. Shifts of groups are multiplied by sums of x afterwards. The formula
// stands in docs/design.md.
//
// Floors: N * K bytes of weights, of codes of fewer bits less, over the bandwidth of memory, 2 * rows * N * K
// operations over the peak of the dot product. To widen 64 codes of up to four bits takes 5 or 6 operations. By tables
// of bytes it takes 6 of FP8 and 8 of int8, without them 56 and 16.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "isa/by_tables.h"
#include "isa/counts.h"
#include "isa/pair_lines.h"
#include "matmul/matmul_pairs_kernel.h"

namespace ingot {
namespace {

constexpr int64_t kSummedPairs = 64;  // whose sums are multiplied by a scale
constexpr int64_t kQuadPairs = 2;     // of four k, which 64 codes have

// How codes become pairs of bf16, and what multiplies their sums:
//   kUnitQuads, kUnitBytes       of codes that share lines; every 64 are four k of 16 columns
//   kRunQuads                    of a unit: those that surely share a scale
//   kHalves                      of lines that a half of the codes of 128 k fills, and then the other half (w4)
//   kByTables                    whether tables of bytes widen them where the CPU permutes bytes
//   kMore                        whether a panel's values may have further bits, 1 / 256 of the others each
//   table(panel, more)           what `widen` wants; more: for those bits
//   widen<S, rows, quad>(to, lines, table)   64 codes of a unit to two lines of 16 pairs; rows multiply them
//   scale(panel, k, bits), shift(panel, k, bits)   of k's group, one of 2^bits k
struct PlainCodes {
  static constexpr int kUnitQuads = 1, kRunQuads = 1, kHalves = 1;
  static constexpr int64_t kUnitBytes = kLineBytes;
  static constexpr bool kMore = false, kShift = false, kByTables = true;
  template <typename S>
  static auto table(const std::byte*, bool) {
    return nullptr;
  }
};
struct F8Codes : PlainCodes {
  template <typename S, int kRows, int>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* lines, std::nullptr_t) {
    load_lines<S, kRows>(to, reinterpret_cast<const uint8_t*>(lines));
  }
  template <typename S>
  static typename S::V scale(const std::byte* panel, int64_t k, int bits) {
    return S::load(reinterpret_cast<const float*>(panel + kHeaderBytes) + (k >> bits) * kPanel);
  }
};
struct W8Codes : PlainCodes {
  template <typename S, int kRows, int>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* lines, std::nullptr_t) {
    S::template load_i8_quads<kRows>(to, reinterpret_cast<const int8_t*>(lines));
  }
  template <typename S>
  static typename S::V scale(const std::byte*, int64_t, int) {
    return S::set1(1.0f);
  }
};
struct W4Codes : PlainCodes {
  static constexpr int kHalves = 2;
  static constexpr bool kByTables = false;
  static constexpr int8_t kNumbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  template <typename S>
  static typename S::ValueTable table(const std::byte*, bool) {
    return S::value_table(kNumbers);
  }
  template <typename S, int, int kHalf>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* line,
                                                  const typename S::ValueTable& table) {
    S::template load_value_quads<4, kHalf>(to, line, table);
  }
  template <typename S>
  static typename S::V scale(const std::byte* panel, int64_t k, int bits) {
    return S::load_i8(reinterpret_cast<const int8_t*>(panel + kHeaderBytes) + (k >> bits) * kPanel);
  }
};

// w2t, w3t, w4t, w8t, and w4ts and w8ts with shifts.
template <typename Format>
struct GroupedCodes {
  static constexpr int kUnitQuads = Format::kLineK / 4, kRunQuads = std::min(kUnitQuads, 4), kHalves = 1;
  static constexpr int64_t kUnitBytes = Format::kCodeBytes;
  static constexpr bool kBytes = Format::kBits == 8, kMore = Format::kBits == 4, kShift = Format::kValues > 1;
  static constexpr bool kByTables = false;

  template <typename S>
  static typename S::ValueTable table(const std::byte* panel, bool more) {
    return S::value_table(more ? panel_more_bits(panel) : panel_table(panel));
  }
  template <typename S, int kRows, int kQuad>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* lines,
                                                  const typename S::ValueTable& table) {
    if constexpr (kBytes)
      S::load_byte_quads(to, reinterpret_cast<const int8_t*>(lines) + kQuad * kLineBytes);
    else
      S::template load_value_quads<Format::kBits, kQuad>(to, lines, table);
  }
  static const uint16_t* numbers(const std::byte* panel, int64_t k, int bits) {
    return reinterpret_cast<const uint16_t*>(panel + kHeaderBytes) + (k >> bits) * kPanel * Format::kValues;
  }
  template <typename S>
  static typename S::V scale(const std::byte* panel, int64_t k, int bits) {
    return S::load_f16(numbers(panel, k, bits));
  }
  // An offset, or a zero point times -scale: a product of two float16, which float32 holds.
  template <typename S>
  static typename S::V shift(const std::byte* panel, int64_t k, int bits) {
    const auto shift = S::load_f16(numbers(panel, k, bits) + kPanel);
    return panel_has_offsets(panel) ? shift : S::sub(S::zero(), S::mul(shift, scale<S>(panel, k, bits)));
  }
};

// w2ks, w3k, w4ks, w5ks and w6k: scales and offsets are whole numbers times units, which float32 holds.
template <typename Format>
struct UnitCodes {
  static constexpr int kUnitQuads = Format::kLineK / 4, kHalves = 1;
  static constexpr int kRunQuads = std::min<int>(kUnitQuads, Format::kShortestGroup / 4);
  static constexpr int64_t kUnitBytes = Format::kCodeBytes;
  static constexpr bool kMore = false, kShift = Format::kValues > 1, kLooksUp = Format::kBits <= 4;
  static constexpr bool kByTables = !kLooksUp;
  static constexpr std::array<int8_t, 16> kNumbers = [] {
    std::array<int8_t, 16> numbers{};
    for (int code = 0; code < 16; ++code) numbers[code] = static_cast<int8_t>(code - Format::kBias);
    return numbers;
  }();

  template <typename S>
  static typename S::ValueTable table(const std::byte*, bool) {
    return S::value_table(kNumbers.data());
  }
  template <typename S, int, int kQuad>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* lines,
                                                  const typename S::ValueTable& table) {
    if constexpr (kLooksUp)
      S::template load_value_quads<Format::kBits, kQuad>(to, lines, table);
    else
      S::template load_code_quads<Format::kBits, kQuad>(to, lines);
  }
  static UnitNumbers<Format> numbers(const std::byte* panel, int64_t k, int bits) {
    const std::byte* const all = panel + kHeaderBytes + k / kUnitK * Format::unit_bytes(bits);
    return UnitNumbers<Format>(reinterpret_cast<const int8_t*>(all), bits);
  }
  template <typename S>
  static typename S::V scale(const std::byte* panel, int64_t k, int bits) {
    const auto all = numbers(panel, k, bits);
    return S::mul(S::load_f16(all.scale), S::load_i8(all.scales + (k % kUnitK >> bits) * kPanel));
  }
  template <typename S>
  static typename S::V shift(const std::byte* panel, int64_t k, int bits) {
    const auto all = numbers(panel, k, bits);
    const int64_t at = k % kUnitK >> bits;
    uint16_t both[kPanel];  // those of two groups
    int8_t offsets[kPanel];
    std::memcpy(both, all.offsets + at / 2 * kPanel * 2, sizeof(both));
    for (int64_t i = 0; i < kPanel; ++i) offsets[i] = static_cast<int8_t>(both[i] >> (at % 2 * 8));
    return S::mul(S::load_f16(all.offset), S::load_i8(offsets));
  }
};

// Pairs that share a scale and the sums that it multiplies, in a part of K.
struct SummedPairs {
  int bits;  // of k in a group
  int64_t step;

  explicit SummedPairs(const TileArgs& args)
      : bits(std::countr_zero(static_cast<uint64_t>(args.group))),
        step(args.group > 0 ? std::min(args.group / 2, kSummedPairs) : kSummedPairs) {}
  template <typename S, typename Codes>
  typename S::V scale(const TileArgs& args, int64_t panel, int64_t at) const {
    if (args.group == 0) return S::set1(1.0f);
    return Codes::template scale<S>(args.beside[panel], 2 * (args.begin + at), bits);
  }
};

// What the first of many tiles leaves of a panel to the others: its values as bf16, then their further bits.
template <typename Codes>
constexpr int64_t kWidenedBytes = kBlockedK * kLineBytes * (Codes::kMore ? 2 : 1);

// Lines of codes as they are stored. The panels of a tile follow one after another.
template <typename Codes>
struct PanelCodePairs {
  static constexpr int64_t kUnitPairs = kQuadPairs * Codes::kUnitQuads;
  static constexpr int64_t kPerLine = kUnitPairs * Codes::kHalves;
  static constexpr int64_t kBytes = Codes::kUnitBytes, kLines = kBytes / kLineBytes;
  static constexpr int64_t kHalfPairs = kTileK / 2;  // of a half
  static constexpr int kRunQuads = Codes::kRunQuads;
  static constexpr int64_t kRunPairs = kQuadPairs * kRunQuads;
  static constexpr int64_t kMostRows = 12;                                   // of a tile that leaves nothing
  static constexpr int64_t kMostFirstRows = Codes::kUnitQuads > 4 ? 8 : 10;  // of a tile that leaves lines
  static constexpr int streams(int) { return 1; }

  // What `tile` of matmul_kernel.h is.
  template <typename S, int kRows, int kPanels, int64_t kXStride, bool kLeaves>
  static void tile(const TileArgs& args) {
    constexpr int64_t kStride = kXStride > 0 ? kXStride : 0;
    for (int p = 0; p < kPanels; ++p) panel<S, kRows, kStride, kLeaves>(args, p);
  }

 private:
  template <int kRows>
  static constexpr bool kKeepsTotals = kRows <= 4;  // in registers

  // Of all kPanels, and of all passes: apart, these would take long to compile.
  template <typename S, int kRows, int64_t kXStride, bool kLeaves>
  [[gnu::noinline]] static void panel(const TileArgs& args, int p) {
    const auto table = Codes::template table<S>(args.beside[p], false);
    const SummedPairs summed(args);
    float* const totals = args.sums + p * args.panel_stride;
    if (args.first) std::fill_n(totals, kRows * kPanel, 0.0f);
    bool more = false;
    if constexpr (Codes::kMore) more = panel_has_more_bits(args.beside[p]);
    typename S::V total[kKeepsTotals<kRows> ? kRows : 1];
    const auto load = [&]() __attribute__((always_inline)) {
      if constexpr (kKeepsTotals<kRows>)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) total[r] = S::load(totals + r * kPanel);
    };
    const auto store = [&]() __attribute__((always_inline)) {
      if constexpr (kKeepsTotals<kRows>)
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) S::store(totals + r * kPanel, total[r]);
    };
    const std::byte* next = kXStride > 0 ? args.next[p] : nullptr;
    load();
    for (int64_t at = 0; at < args.k; at += summed.step) {
      add_step<S, kRows, kXStride, kLeaves>(args, p, at, table, summed, next, total);
      if constexpr (Codes::kMore)
        if (more) {
          store();
          add_more<S, kRows, kXStride, kLeaves>(args, p, at, summed);
          load();
        }
    }
    store();
  }

  // Pairs [at, at + step).
  template <typename S, int kRows, int64_t kXStride, bool kLeaves, typename Table, typename Total>
  [[gnu::always_inline]] static inline void add_step(const TileArgs& args, int p, int64_t at, const Table& table,
                                                     const SummedPairs& summed, const std::byte*& next, Total& total) {
    using V = typename S::V;
    using Line = const std::byte*;
    constexpr bool kMany = kXStride > 0;
    const int64_t x_stride = kMany ? kXStride : args.x_stride, end = std::min(at + summed.step, args.k);
    float* widened = nullptr;
    if constexpr (kLeaves) widened = args.widened + p * args.widened_stride + at * kPanel;
    V even[kRows][1], odd[kRows][1];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) even[r][0] = odd[r][0] = S::zero();

    const auto next_lines = [&](const std::byte* line) __attribute__((always_inline)) {
#pragma GCC unroll 5
      for (int64_t i = 0; i < kBytes; i += kLineBytes) {
        if constexpr (kMany) {
          S::prefetch_far(next);
          next += args.next_step / kLines;
        } else if constexpr (kRows == 1) {
          S::prefetch(line + i + ahead_in_order(4096));
        } else if constexpr (kRows <= kTwoDistances<S>) {
          S::prefetch_stream(line + i);
        } else {
          S::prefetch(line + i + 2048);
        }
      }
    };
    const auto add_run = [&]<int kFirst>(const std::byte* line, const float* x) __attribute__((always_inline)) {
      int64_t stride = x_stride;
      if constexpr (!kMany)
        asm volatile("" : "+r"(stride));  // else sums of addresses are kept, more than there are registers
      for_each(std::make_integer_sequence<int, kRunQuads>(), [&]<int q>() __attribute__((always_inline)) {
        V weight[2], pair[1][1];
        Codes::template widen<S, kRows, kFirst + q>(weight, line, table);
        if constexpr (kLeaves) {
          S::store(widened, weight[0]);
          S::store(widened + kPanel, weight[1]);
          widened += kQuadPairs * kPanel;
        }
        pair[0][0] = weight[0];
        add_products<S>(even, x + kQuadPairs * q, stride, pair);
        pair[0][0] = weight[1];
        add_products<S>(odd, x + kQuadPairs * q + 1, stride, pair);
      });
      if constexpr (kFirst == 0 || Codes::kHalves == 2) next_lines(line);  // else they were asked for
    };
    // The last pairs of K, fewer than a run has.
    const auto add_rest = [&]<int kFirst>(Line line, const float* x, int64_t pairs) __attribute__((always_inline)) {
      alignas(kLineBytes) float own[kLeaves ? 1 : kRunPairs * kPanel];
      float* const lines = kLeaves ? widened : own;
      widen_run<S, kFirst>(lines, line, args.beside[p], false);
      add_widened<S>(even, odd, x, x_stride, lines, pairs);
    };
    // Runs from quad kFirst on, of units or of lines that follow each other.
    const auto add_runs = [&]<int kFirst>(Line line, const float* x, int64_t pairs) __attribute__((always_inline)) {
      for (; pairs >= kRunPairs; pairs -= kRunPairs, x += kRunPairs, line += kBytes)
        add_run.template operator()<kFirst>(line, x);
      if (pairs > 0) add_rest.template operator()<kFirst>(line, x, pairs);
    };

    const std::byte* const begin = args.panels[p];
    if constexpr (Codes::kHalves == 2) {
      for (int64_t from = at, to; from < end; from = to) {
        const int64_t half = from / kHalfPairs;
        to = std::min((half + 1) * kHalfPairs, end);
        const std::byte* const line = begin + (half / 2 * kHalfPairs + from % kHalfPairs) / kQuadPairs * kLineBytes;
        if (half % 2 == 0)
          add_runs.template operator()<0>(line, args.x + from, to - from);
        else
          add_runs.template operator()<1>(line, args.x + from, to - from);
      }
    } else if constexpr (kUnitPairs == kRunPairs) {
      add_runs.template operator()<0>(begin + at / kUnitPairs * kBytes, args.x + at, end - at);
    } else {  // two runs of a unit in turn
      const std::byte* line = begin + at / kUnitPairs * kBytes;
      const float* x = args.x + at;
      bool second = at % kUnitPairs != 0;
      for (int64_t pairs = end - at; pairs > 0; pairs -= kRunPairs, x += kRunPairs, second = !second) {
        const std::byte* const unit = line;
        if (second) line += kBytes;
        if (pairs < kRunPairs) {
          if (second)
            add_rest.template operator()<kRunQuads>(unit, x, pairs);
          else
            add_rest.template operator()<0>(unit, x, pairs);
        } else if (second) {
          add_run.template operator()<kRunQuads>(unit, x);
        } else {
          add_run.template operator()<0>(unit, x);
        }
      }
    }
    const V scale = summed.template scale<S, Codes>(args, p, at);
    if constexpr (kKeepsTotals<kRows>) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r] = S::fma(odd[r][0], scale, S::fma(even[r][0], scale, total[r]));
    } else {
      add_to_totals<S>(args.sums + p * args.panel_stride, even, odd, scale);
    }
  }

  // The further bits of the values of pairs [at, at + step).
  template <typename S, int kRows, int64_t kXStride, bool kLeaves>
  [[gnu::noinline]] static void add_more(const TileArgs& args, int p, int64_t at, const SummedPairs& summed) {
    static_assert(kUnitPairs == kRunPairs && kSummedPairs % kRunPairs == 0);
    alignas(kLineBytes) float own[kLeaves ? 1 : kSummedPairs * kPanel];
    float* const lines = kLeaves ? args.widened + p * args.widened_stride + (at + kBlockedK) * kPanel : own;
    const int64_t pairs = std::min(summed.step, args.k - at);
    const std::byte* line = args.panels[p] + at / kUnitPairs * kBytes;
    for (int64_t i = 0; i < pairs; i += kRunPairs, line += kBytes)
      widen_run<S, 0>(lines + i * kPanel, line, args.beside[p], true);
    typename S::V even[kRows][1], odd[kRows][1];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) even[r][0] = odd[r][0] = S::zero();
    add_widened<S>(even, odd, args.x + at, kXStride > 0 ? kXStride : args.x_stride, lines, pairs);
    const auto scale = S::mul(summed.template scale<S, Codes>(args, p, at), S::set1(kMoreUnit));
    add_to_totals<S>(args.sums + p * args.panel_stride, even, odd, scale);
  }

  // Codes of a run to pairs of bf16. more: their values' further bits.
  template <typename S, int kFirst>
  [[gnu::noinline]] static void widen_run(float* to, const std::byte* line, const std::byte* panel, bool more) {
    const auto table = Codes::template table<S>(panel, more);
    for_each(std::make_integer_sequence<int, kRunQuads>(), [&]<int q>() __attribute__((always_inline)) {
      typename S::V weight[2];
      Codes::template widen<S, 1, kFirst + q>(weight, line, table);
      S::store(to + kQuadPairs * q * kPanel, weight[0]);
      S::store(to + (kQuadPairs * q + 1) * kPanel, weight[1]);
    });
  }

  // sums += x * lines of bf16.
  template <typename S, int kRows>
  [[gnu::always_inline]] static inline void add_widened(typename S::V (&even)[kRows][1], typename S::V (&odd)[kRows][1],
                                                        const float* x, int64_t x_stride, const float* lines,
                                                        int64_t pairs) {
    for (; pairs > 0; pairs -= kQuadPairs, x += kQuadPairs, lines += kQuadPairs * kPanel) {
      typename S::V pair[1][1] = {{S::load(lines)}};
      add_products<S>(even, x, x_stride, pair);
      if (pairs == 1) break;
      pair[0][0] = S::load(lines + kPanel);
      add_products<S>(odd, x + 1, x_stride, pair);
    }
  }

  template <typename S, int kRows>
  [[gnu::always_inline]] static inline void add_to_totals(float* totals, const typename S::V (&even)[kRows][1],
                                                          const typename S::V (&odd)[kRows][1], typename S::V scale) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* const total = totals + r * kPanel;
      S::store(total, S::fma(odd[r][0], scale, S::fma(even[r][0], scale, S::load(total))));
    }
  }
};

// Lines of bf16 as the first tile leaves them, a pair each.
template <typename Codes>
struct PanelWidenedPairs {
  static constexpr int64_t kPerLine = 1;
  static constexpr int64_t kBytes = kLineBytes;

  template <typename S, int kRows, int kPanels, int64_t kXStride, bool>
  static void tile(const TileArgs& args) {
    const SummedPairs summed(args);
    const std::byte *line[kPanels], *next[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      line[p] = args.panels[p];
      next[p] = args.next[p];
    }
    if (args.first)
      for (int p = 0; p < kPanels; ++p) std::fill_n(args.sums + p * args.panel_stride, kRows * kPanel, 0.0f);
    for (int64_t at = 0; at < args.k; at += summed.step) {
      add_step<S, kRows, kPanels, kXStride, false>(args, 0, at, summed, line, next);
      if constexpr (Codes::kMore)
        for (int p = 0; p < kPanels; ++p)
          if (panel_has_more_bits(args.beside[p])) add_more<S, kRows, kXStride>(args, p, at, summed);
    }
  }

 private:
  template <typename S, int kRows, int64_t kXStride>
  [[gnu::noinline]] static void add_more(const TileArgs& args, int p, int64_t at, const SummedPairs& summed) {
    const std::byte *line[1] = {args.panels[p] + kBlockedK * kLineBytes}, *next[1] = {args.next[p]};
    add_step<S, kRows, 1, kXStride, true>(args, p, at, summed, line, next);
  }

  // Pairs [at, at + step) of panels from `first` on.
  template <typename S, int kRows, int kPanels, int64_t kXStride, bool kMoreBits>
  [[gnu::always_inline]] static inline void add_step(const TileArgs& args, int first, int64_t at,
                                                     const SummedPairs& summed, const std::byte* (&line)[kPanels],
                                                     const std::byte* (&next)[kPanels]) {
    using V = typename S::V;
    const int64_t x_stride = kXStride > 0 ? kXStride : args.x_stride;
    const int64_t pairs = std::min(summed.step, args.k - at);
    V sum[kRows][kPanels];
    for (int64_t odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) sum[r][p] = S::zero();
      for (int64_t pair = at + odd; pair < at + pairs; pair += 2) {
        V weight[kPanels][1];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          weight[p][0] = load_pairs<S>(reinterpret_cast<const uint16_t*>(line[p] + pair * kLineBytes));
          S::prefetch_far(next[p]);
          next[p] += args.next_step;
        }
        add_products<S>(sum, args.x + pair, x_stride, weight);
      }
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        V scale = summed.template scale<S, Codes>(args, first + p, at);
        if constexpr (kMoreBits) scale = S::mul(scale, S::set1(kMoreUnit));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          float* const total = args.sums + (first + p) * args.panel_stride + r * kPanel;
          S::store(total, S::fma(sum[r][p], scale, S::load(total)));
        }
      }
    }
  }
};

template <typename Format, typename Codes>
struct CodePairsWeight {
  using Stream = PanelCodePairs<Codes>;
  using First = PanelCodePairs<Codes>;
  using Blocked = PanelWidenedPairs<Codes>;
  static constexpr bool kScaled = true, kAddsShifts = Codes::kShift, kByTables = Codes::kByTables;
  static constexpr int64_t kStreamRows = 12, kPassRows = 3 * kStreamRows;
  static constexpr int64_t kStreamPart = INT64_MAX, kStreamBytes = 0;
  static constexpr int64_t kBlockedBytes = kWidenedBytes<Codes>;
  Format format;

  // args: k in pairs.
  template <typename Args>
  explicit CodePairsWeight(const Args& args) : format(Columns{2 * args.k, args.group}), pairs_(args.k) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const {
    const std::byte* const codes = stored(panel, at);
    if (at == 0 && reads_in_order()) read_header(panel, codes);
    return codes;
  }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, 2 * at); }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, Stream::kPerLine) * Stream::kBytes; }
  static const std::byte* beside(const std::byte* panel, int64_t) { return panel; }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

  // sums [panel][row][16] += shift of each group * sum of x over the group, groups ascending. row_of(row): its pairs,
  // and behind them its sums.
  template <typename S, typename RowOf>
  void add_shifts(const std::byte* const* panels, int64_t count, int64_t rows, const RowOf& row_of, float* sums,
                  int64_t stride) const
    requires kAddsShifts
  {
    constexpr int kAtOnce = 8;
    const auto some = [&]<int kRows>(const std::byte* panel, int64_t first, float* to) __attribute__((always_inline)) {
      const float* of_x[kRows];
      typename S::V total[kRows];
      for (int64_t r = 0; r < kRows; ++r) of_x[r] = row_of(first + r) + pairs_, total[r] = S::load(to + r * kPanel);
      const int bits = std::countr_zero(static_cast<uint64_t>(format.group));
      for (int64_t k = 0, g = 0; k < 2 * pairs_; k += format.group, ++g) {
        const auto shift = Codes::template shift<S>(panel, k, bits);
        for (int64_t r = 0; r < kRows; ++r) total[r] = S::fma(shift, S::set1(of_x[r][g]), total[r]);
      }
      for (int64_t r = 0; r < kRows; ++r) S::store(to + r * kPanel, total[r]);
    };
    for (int64_t p = 0; p < count; ++p, sums += stride)
      for (int64_t r = 0; r < rows; r += kAtOnce)
        with_count<kAtOnce>(std::min<int64_t>(kAtOnce, rows - r),
                            [&]<int kRows>() { some.template operator()<kRows>(panels[p], r, sums + r * kPanel); });
  }

 private:
  struct Columns {
    int64_t k, group;
  };
  int64_t pairs_;
};
using F8PairsWeight = CodePairsWeight<F8, F8Codes>;
using W8PairsWeight = CodePairsWeight<W8, W8Codes>;
using W4PairsWeight = CodePairsWeight<W4, W4Codes>;
template <typename Format>
using GroupedPairsWeight = CodePairsWeight<Format, GroupedCodes<Format>>;
template <typename Format>
using UnitPairsWeight = CodePairsWeight<Format, UnitCodes<Format>>;

// f<S>(), S being as the codes of a weight are widened on this CPU.
template <typename Weight, typename F>
void widening(F f) {
  if constexpr (Weight::kByTables)
    by_tables<Pairs, TablePairs>(f);
  else
    f.template operator()<Pairs>();
}
template <typename Weight>
void matmul_code_pairs(const MatmulArgs& args, const Team& team) {
  widening<Weight>([&]<typename S>() { matmul_pairs<S, Weight>(args, team); });
}
template <typename Weight>
void moe_gate_up_code_pairs(const MoeMatmulArgs& args, const Team& team) {
  widening<Weight>([&]<typename S>() { moe_gate_up<S, PairsProduct<S, Weight>>(args, team); });
}
template <typename Weight>
void moe_down_code_pairs(const MoeMatmulArgs& args, const Team& team) {
  widening<Weight>([&]<typename S>() { moe_down<S, PairsProduct<S, Weight>>(args, team); });
}

}  // namespace
}  // namespace ingot
