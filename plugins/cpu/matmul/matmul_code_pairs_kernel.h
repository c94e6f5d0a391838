// Products of quantised weights by the dot product of bf16, which holds every number of FP8, every int8 and every code
// of four bits: x is rounded to bf16. Up to 128 columns, those of a group if it has fewer, make two sums, of even and
// of odd pairs of k. A sum is started at 0 and fed with a pair per instruction, k ascending. Both are multiplied by the
// group's scale or multiplier and added up by fma, even pairs first, k ascending. So the blocking changes no bit, and
// the two pairs of a stored line never wait for each other.
//
// Floors: N * K bytes of weights, of w4 half as many, over the bandwidth of memory, 2 * rows * N * K operations over
// the peak of the dot product. To widen 64 codes takes 5 operations of w4. By tables of bytes it takes 6 of FP8 and 8
// of int8, without them 56 and 16.
#pragma once

#include <algorithm>

#include "isa/pair_lines.h"
#include "matmul/matmul_pairs_kernel.h"

namespace ingot {
namespace {

constexpr int64_t kSummedPairs = 64;  // whose sums are multiplied by a scale
constexpr int64_t kQuadPairs = 2;     // of four k, which 64 codes have

// Pairs that share a scale and the sums that it multiplies, in a part of K.
struct SummedPairs {
  int64_t group, step;

  explicit SummedPairs(const TileArgs& args)
      : group(args.group > 0 ? args.group / 2 : INT64_MAX), step(std::min(group, kSummedPairs)) {}
  template <typename S, typename Codes>
  typename S::V scale(const TileArgs& args, int64_t panel, int64_t at) const {
    if (args.group == 0) return S::set1(1.0f);
    return Codes::template scale<S>(args.beside[panel], at / group);
  }
};

// total += sum * scale; total = sum * scale where it is the first one.
template <typename S>
[[gnu::always_inline]] inline void add_to_total(float* total, typename S::V sum, typename S::V scale, bool first) {
  S::store(total, S::fma(sum, scale, first ? S::zero() : S::load(total)));
}

// How codes lie in 64 bytes: kHalves times 64 of four k. Codes of the second half belong to columns kHalfPairs pairs
// further on. widen: half kHalf of a line → two lines of 16 pairs; scale: of a group, from what lies beside the codes.
struct F8Codes {
  static constexpr int kHalves = 1;
  static constexpr int64_t kHalfPairs = INT64_MAX;
  template <typename S, int kRows, int kHalf>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* line) {
    load_lines<S, kRows>(to, reinterpret_cast<const uint8_t*>(line));
  }
  template <typename S>
  static typename S::V scale(const std::byte* beside, int64_t group) {
    return S::load(reinterpret_cast<const float*>(beside) + group * kPanel);
  }
};
struct W8Codes {
  static constexpr int kHalves = 1;
  static constexpr int64_t kHalfPairs = INT64_MAX;
  template <typename S, int kRows, int kHalf>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* line) {
    S::template load_i8_quads<kRows>(to, reinterpret_cast<const int8_t*>(line));
  }
  template <typename S>
  static typename S::V scale(const std::byte*, int64_t) {
    return S::set1(1.0f);
  }
};
struct W4Codes {
  static constexpr int kHalves = 2;
  static constexpr int64_t kHalfPairs = kTileK / 2;
  template <typename S, int, int kHalf>
  [[gnu::always_inline]] static inline void widen(typename S::V (&to)[2], const std::byte* line) {
    S::template load_i4_quads<kHalf>(to, line);
  }
  template <typename S>
  static typename S::V scale(const std::byte* beside, int64_t group) {
    return S::load_i8(reinterpret_cast<const int8_t*>(beside) + group * kPanel);
  }
};

// Lines of codes as they are stored. The panels of a tile follow one after another.
template <typename Codes>
struct PanelCodePairs {
  static constexpr int64_t kPerLine = kQuadPairs * Codes::kHalves;
  static constexpr int64_t kBytes = kLineBytes;
  static constexpr int64_t kMostFirstRows = 10;
  static constexpr int streams(int) { return 1; }

  // What `tile` of matmul_kernel.h is.
  template <typename S, int kRows, int kPanels, int64_t kXStride, bool kLeaves>
  static void tile(const TileArgs& args) {
    for (int p = 0; p < kPanels; ++p) panel<S, kRows, kXStride, kLeaves>(args, p);
  }

 private:
  template <typename S, int kRows, int64_t kXStride, bool kLeaves>
  [[gnu::always_inline]] static inline void panel(const TileArgs& args, int p) {
    using V = typename S::V;
    constexpr bool kMany = kXStride > 0;
    const int64_t x_stride = kMany ? kXStride : args.x_stride;
    const SummedPairs summed(args);
    const std::byte *line = args.panels[p], *next = kMany ? args.next[p] : nullptr;
    float* widened = kLeaves ? args.widened + p * args.widened_stride : nullptr;
    float* const total = args.sums + p * args.panel_stride;
    V even[kRows][1], odd[kRows][1];

    const auto add_line = [&]<int kHalf, bool kBoth>(const float* x) __attribute__((always_inline)) {
      V weight[2], pair[1][1];
      Codes::template widen<S, kRows, kHalf>(weight, line);
      if constexpr (kLeaves) {
        S::store(widened, weight[0]);
        S::store(widened + kPanel, weight[1]);
        widened += kQuadPairs * kPanel;
      }
      pair[0][0] = weight[0];
      add_products<S>(even, x, x_stride, pair);
      pair[0][0] = weight[1];
      if constexpr (kBoth) add_products<S>(odd, x + 1, x_stride, pair);
      if constexpr (kHalf == 0) {  // the other half is there
        if constexpr (kMany) {
          S::prefetch_far(next);
          next += args.next_step;
        } else if constexpr (kRows == 1) {
          S::prefetch(line + ahead_in_order(4096));
        } else if constexpr (kRows <= kTwoDistances<S>) {
          S::prefetch_stream(line);
        } else {
          S::prefetch(line + 2048);
        }
      }
      line += kLineBytes;
    };
    const auto add_half = [&]<int kHalf>(const float* x, int64_t pairs) __attribute__((always_inline)) {
      for (int64_t i = 0; i < pairs / kQuadPairs; ++i, x += kQuadPairs) add_line.template operator()<kHalf, true>(x);
      if (pairs % kQuadPairs > 0) add_line.template operator()<kHalf, false>(x);
    };

    for (int64_t at = 0; at < args.k; at += summed.step) {
      const int64_t end = std::min(at + summed.step, args.k);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) even[r][0] = odd[r][0] = S::zero();
      if constexpr (Codes::kHalves == 1) {
        add_half.template operator()<0>(args.x + at, end - at);
      } else {
        for (int64_t from = at, to; from < end; from = to) {
          to = std::min(from / Codes::kHalfPairs * Codes::kHalfPairs + Codes::kHalfPairs, end);
          const int64_t half = from / Codes::kHalfPairs;
          line = args.panels[p] + (half / 2 * Codes::kHalfPairs + from % Codes::kHalfPairs) / kQuadPairs * kLineBytes;
          if (half % 2 == 0)
            add_half.template operator()<0>(args.x + from, to - from);
          else
            add_half.template operator()<1>(args.x + from, to - from);
        }
      }
      const V scale = summed.template scale<S, Codes>(args, p, at);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        add_to_total<S>(total + r * kPanel, even[r][0], scale, args.first && at == 0);
        add_to_total<S>(total + r * kPanel, odd[r][0], scale, false);
      }
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
    using V = typename S::V;
    const int64_t x_stride = kXStride > 0 ? kXStride : args.x_stride;
    const SummedPairs summed(args);
    const std::byte *line[kPanels], *next[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      line[p] = args.panels[p];
      next[p] = args.next[p];
    }
    V sum[kRows][kPanels];
    for (int64_t at = 0; at < args.k; at += summed.step) {
      const int64_t pairs = std::min(summed.step, args.k - at);
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
          const V scale = summed.template scale<S, Codes>(args, p, at);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
            add_to_total<S>(args.sums + p * args.panel_stride + r * kPanel, sum[r][p], scale,
                            args.first && at + odd == 0);
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
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = 12, kPassRows = 3 * kStreamRows;
  static constexpr int64_t kStreamPart = INT64_MAX, kStreamBytes = 0;
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  Format format;

  // args: k in pairs.
  template <typename Args>
  explicit CodePairsWeight(const Args& args) : format(Columns{2 * args.k, args.group}) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const {
    const std::byte* const codes = stored(panel, at);
    if (at == 0 && reads_in_order()) read_header(panel, codes);
    return codes;
  }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, 2 * at); }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, Stream::kPerLine) * kLineBytes; }
  const std::byte* beside(const std::byte* panel, int64_t at) const {
    if constexpr (requires { format.scales(panel, at); })
      return reinterpret_cast<const std::byte*>(format.scales(panel, 2 * at));
    else
      return reinterpret_cast<const std::byte*>(format.multipliers(panel, 2 * at));
  }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }

 private:
  struct Columns {
    int64_t k, group;
  };
};
using F8PairsWeight = CodePairsWeight<F8, F8Codes>;
using W8PairsWeight = CodePairsWeight<W8, W8Codes>;
using W4PairsWeight = CodePairsWeight<W4, W4Codes>;

}  // namespace
}  // namespace ingot
