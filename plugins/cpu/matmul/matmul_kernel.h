// Matrix products on vectors: every output is one sum, started at 0 and fed by one fma per k in ascending order,
// whatever the blocking. k beyond K (padding of bf16 panels) is never touched.
//
// Floors: N * K * (4 or 2) bytes of weights over the bandwidth of memory, 2 * rows * N * K operations over the peak of
// fma. Few rows are bound by memory, many by fma. Quantised weights cost their widening, which bounds a single row.
#pragma once

#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "isa/broadcasts.h"
#include "matmul/matmul_parts.h"
#include "matmul/quantised.h"

namespace ingot {
namespace {

// One line (kBytes) of a panel, widened to float32: kPerLine rows of 16 columns.
struct PanelF32 {
  static constexpr int64_t kPerLine = 1;  // k per line
  static constexpr int64_t kBytes = kLineBytes;
  static int64_t bytes(int64_t k) { return k * kLineBytes; }

  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, int column) {
    return S::load(reinterpret_cast<const float*>(line) + column);
  }
};

struct PanelBf16 {
  static constexpr int64_t kPerLine = 2;
  static constexpr int64_t kBytes = kLineBytes;
  static int64_t bytes(int64_t k) { return ceil_div(k, 32) * 16 * kLineBytes; }

  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, int column) {
    typename S::V even, odd;
    S::load_bf16_pairs(line + column * 4, even, odd);
    return kK == 0 ? even : odd;
  }
};

// Four k of int8, widened.
struct PanelInt8 {
  static constexpr int64_t kPerLine = 4;
  static constexpr int64_t kBytes = kLineBytes;

  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, int column) {
    return S::template load_quads<kK>(line + column * 4);
  }
};

constexpr int64_t kBlockedK = 256;  // k of a part, in lines of float32

// How a weight comes to its lines in a part of K: those that tiles read once, and those that the first of many tiles
// leaves widened to the others (Blocked). Float lines are used where they lie. The scales of groups of FP8 go to tiles
// beside its lines.
template <typename Panel>
struct FloatWeight {
  using Stream = Panel;                                          // of few rows
  using First = Panel;                                           // of the first tile of many
  using Blocked = Panel;                                         // of the others
  static constexpr bool kScaled = false;                         // whether panels begin with scales
  static constexpr int64_t kStreamRows = INT64_MAX;              // more of them are faster in blocks
  static constexpr int64_t kStreamPart = INT64_MAX;              // most k at once
  static constexpr int64_t kStreamBytes = 0, kBlockedBytes = 0;  // of scratch for a part of one panel
  int64_t k;

  template <typename Args>
  explicit FloatWeight(const Args& args) : k(args.k) {}
  int64_t panel_bytes() const { return Panel::bytes(k); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const { return stored(panel, at); }
  const std::byte* stored(const std::byte* panel, int64_t at) const {
    return panel + at / Panel::kPerLine * kLineBytes;
  }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, Panel::kPerLine) * kLineBytes; }
  static const std::byte* beside(const std::byte*, int64_t) { return nullptr; }
  template <typename S>
  PlainSums<S> sums(const MatmulArgs&) const {
    return {};
  }
};

// To widen a line takes two operations of each tile from fma, amid whose products they cost the first one little: by
// themselves, as much as three and a half rows.
struct Bf16Weight : FloatWeight<PanelBf16> {
  using Blocked = PanelF32;
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  using FloatWeight<PanelBf16>::FloatWeight;
};

// Quantised weights (W8, W4): int8 lines.
template <typename I, typename Format>
struct QuantisedWeight {
  using Stream = PanelInt8;
  using First = Stream;
  using Blocked = PanelF32;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = INT64_MAX;
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  static constexpr int64_t kStreamPart = Format::kTiles == 1 ? INT64_MAX : kBlockedK;
  static constexpr int64_t kStreamBytes = Format::kTiles == 1 ? 0 : kBlockedK * kPanel;
  Format format;

  template <typename Args>
  explicit QuantisedWeight(const Args& args) : format(args) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t part, std::byte* to) const {
    return format.template tiles<I>(panel, at / kTileK, tiles_of(part), to);
  }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at); }
  static int64_t stored_bytes(int64_t part) { return code_bytes<Format>(tiles_of(part)); }
  static const std::byte* beside(const std::byte*, int64_t) { return nullptr; }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }
};

// FP8. A scale multiplies each number when it is widened, so that a sum is that of the numbers a weight stands for.
struct F8Weight {
  using Stream = PanelF8;
  using First = Stream;
  using Blocked = PanelF32;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStreamRows = INT64_MAX, kStreamPart = INT64_MAX, kStreamBytes = 0;
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  F8 format;

  template <typename Args>
  explicit F8Weight(const Args& args) : format(args) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const { return stored(panel, at); }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at); }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, F8::kLineK) * kLineBytes; }
  const std::byte* beside(const std::byte* panel, int64_t at) const {
    return reinterpret_cast<const std::byte*>(format.scales(panel, at));
  }
  template <typename S>
  ScaledSums<S> sums(const MatmulArgs& args) const {
    return {args, panel_bytes()};
  }
};

struct Bf16c;

// Sums of `rows` rows x kPanels panels over k values of x: sums[panel][row][16], continued unless `first`.
struct TileArgs {
  const float* x;
  int64_t x_stride;
  const std::byte* const* panels;
  int64_t k;
  float* sums;
  int64_t panel_stride;
  bool first;
  const std::byte* const* beside = nullptr;  // of FP8, scales of the groups of each panel; of bf16c, each panel
  int64_t begin = 0;                         // of k
  int64_t group = 0;                         // k of a group; the first k begins one. 0: there are no groups
  const std::byte* const* next = nullptr;    // what is fetched meanwhile, from each pointer on, and
  int64_t next_step = 0;                     // bytes of it per line
  float* widened = nullptr;                  // where lines are left as PanelF32 has them, and
  int64_t widened_stride = 0;                // floats from a panel to the next one
  const Bf16c* compressed = nullptr;         // how bf16c lies there
};

constexpr int64_t kPass = -1;  // see tile

// Few rows ask for lines at two distances: up to so many.
template <typename S>
constexpr int kTwoDistances = 4;
template <typename S>
  requires requires { S::kWorkingRows; }
constexpr int kTwoDistances<S> = S::kWorkingRows;

// kXStride: of the many rows of a block; 0 of few rows, whose weights come from memory, in order; kPass of one of
// several passes, which ask L2 for the panels that come next. kLeaves: lines widened. GCC would keep arrays of vectors
// in memory if the loops over them were not unrolled: hence the pragmas.
template <typename S, typename Panel, int kRows, int kPanels, int64_t kXStride, bool kLeaves>
void tile(const TileArgs& args) {
  using V = typename S::V;
  constexpr bool kMany = kXStride > 0, kOfGroups = std::is_same_v<Panel, PanelF8>;
  constexpr bool kLines = kOfGroups && !kMany && kRows <= 4 && requires(V(&to)[4]) { S::load_f8_lines(to, args.x); };
  const int64_t x_stride = kMany ? kXStride : args.x_stride;
  constexpr int kVectors = kPanels * kPanel / S::kWidth;
  V sum[kRows][kVectors];
  const auto sums_at = [&](int r, int v) {
    constexpr int kPerPanel = kPanel / S::kWidth;
    return args.sums + v / kPerPanel * args.panel_stride + r * kPanel + v % kPerPanel * S::kWidth;
  };
  const std::byte *line[kPanels], *next[kPanels];
#pragma GCC unroll 16
  for (int p = 0; p < kPanels; ++p) {
    line[p] = args.panels[p];
    if (kMany) next[p] = args.next[p];
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[r][v] = args.first ? S::zero() : S::load(sums_at(r, v));

  float* widened = args.widened;
  V scale[kVectors] = {};  // of FP8, times what load_f8 leaves out
  int64_t groups = 0;
  const auto next_scales = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      constexpr int kPerPanel = kPanel / S::kWidth;
      scale[v] = S::set1(kLines ? 1.0f : kF8Unit);
      if (args.group > 0)
        scale[v] = S::mul(scale[v], S::load(reinterpret_cast<const float*>(args.beside[v / kPerPanel]) +
                                            groups * kPanel + v % kPerPanel * S::kWidth));
    }
    ++groups;
  };
  const auto add_k = [&]<int kK>(const float* x) __attribute__((always_inline)) {
    V weight[kVectors][1];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      constexpr int kPerPanel = kPanel / S::kWidth;
      const int p = v / kPerPanel, column = v % kPerPanel * S::kWidth;
      weight[v][0] = Panel::template load<S, kK>(line[p], column);
      if constexpr (kOfGroups) weight[v][0] = S::mul(weight[v][0], scale[v]);
      if constexpr (kLeaves) S::store(widened + p * args.widened_stride + kK * kPanel + column, weight[v][0]);
    }
    add_products<S>(sum, x, x_stride, weight);
  };
  const auto add_lines = [&](const float* x) __attribute__((always_inline)) {  // four k of FP8 at once
    if constexpr (kLines)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        V weight[4];
        S::load_f8_lines(weight, line[p]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          weight[i] = S::mul(weight[i], scale[p]);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) S::accumulate(sum[r][p], S::set1(x[r * x_stride + i]), weight[i]);
        }
      }
  };
  const float* x = args.x;
  const int64_t whole = args.k / Panel::kPerLine, rest = args.k % Panel::kPerLine;
  const int64_t lines = kOfGroups && args.group > 0 ? args.group / Panel::kPerLine : INT64_MAX;  // of a group
  int64_t left = 0;
  for (int64_t i = 0; i < whole; ++i, x += Panel::kPerLine) {
    if constexpr (kOfGroups) {
      if (left == 0) {
        next_scales();
        left = lines;
      }
      --left;
    }
    if constexpr (kLines) {
      add_lines(x);
    } else {
      add_k.template operator()<0>(x);
      if constexpr (Panel::kPerLine > 1) add_k.template operator()<1>(x + 1);
      if constexpr (Panel::kPerLine > 2) {
        add_k.template operator()<2>(x + 2);
        add_k.template operator()<3>(x + 3);
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      if constexpr (kMany) {
        S::prefetch_far(next[p]);
        next[p] += args.next_step;
      } else {
#pragma GCC unroll 3
        for (int64_t at = 0; at < Panel::kBytes; at += kLineBytes) {
          if constexpr (kRows <= kTwoDistances<S>) {
            prefetch_panel<S, kRows>(line[p] + at);
          } else {  // a second distance costs more than it gives
            S::prefetch(line[p] + at + 2048);
          }
        }
      }
      line[p] += Panel::kBytes;
    }
    if constexpr (kLeaves) widened += Panel::kPerLine * kPanel;
  }
  if (kOfGroups && rest > 0 && left == 0) next_scales();
  if constexpr (kLines)
    for (V& each : scale) each = S::mul(each, S::set1(kF8Unit));
  if (rest > 0) add_k.template operator()<0>(x);
  if constexpr (Panel::kPerLine > 2) {
    if (rest > 1) add_k.template operator()<1>(x + 1);
    if (rest > 2) add_k.template operator()<2>(x + 2);
  }

#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) S::store(sums_at(r, v), sum[r][v]);
}

template <typename Weight>
const Bf16c* compressed_of(const Weight& weight) {
  if constexpr (requires { weight.compressed; })
    return &weight.compressed;
  else
    return nullptr;
}

using TileFn = void (*)(const TileArgs&);
template <typename S, typename Panel, int kRows, int kPanels, int64_t kXStride, bool kLeaves>
constexpr TileFn tile_fn() {
  if constexpr (requires { &Panel::template tile<S, kRows, kPanels, kXStride, kLeaves>; })
    return Panel::template tile<S, kRows, kPanels, kXStride, kLeaves>;
  else
    return tile<S, Panel, kRows, kPanels, kXStride, kLeaves>;
}

constexpr int64_t kMaxStreams = 4;  // panels of a tile of few rows

template <typename S, typename Panel>
struct Tiles {
  static constexpr bool kWide = S::kWidth == kPanel;
  // Sums of kRows x kPanels panels fill the registers, unless a Panel needs some of them; few rows where the lanes are
  // emulated, to compile sooner.
  static constexpr int kRows = [] {
    constexpr int kMost = S::kRegisters >= 32 ? 14 : kWide ? 5 : 6;
    if constexpr (requires { Panel::kMostRows; }) return std::min(kMost, static_cast<int>(Panel::kMostRows));
    return kMost;
  }();
  // Of a tile that leaves its lines widened.
  static constexpr int kFirstRows = [] {
    if constexpr (requires { Panel::kMostFirstRows; }) return std::min(kRows, static_cast<int>(Panel::kMostFirstRows));
    return kRows;
  }();
  static constexpr int kPanels = kWide ? 2 : 1;

  // Panels of a tile of few rows: with vectors of 8 lanes, enough chains of fma to hide the latency of each; of 16,
  // half as many, which are still faster than memory, and memory is faster with fewer streams.
  static constexpr int stream_panels(int rows) {
    if constexpr (requires { Panel::streams(rows); }) return Panel::streams(rows);
    if constexpr (requires { S::kWorkingRows; }) {
      if (rows <= S::kWorkingRows) return 1;
    }
    return std::max(4 / rows, kPanels);
  }
  // On this CPU.
  static int64_t panels_at_once(int64_t rows) {
    if constexpr (requires { Panel::streams_here(rows); }) return Panel::streams_here(rows);
    return stream_panels(static_cast<int>(rows));
  }

  template <int kCount, int64_t kXStride, bool kLeaves, size_t... kR>
  static constexpr std::array<TileFn, sizeof...(kR)> table(std::index_sequence<kR...>) {
    // clang-format off: it takes the brackets of the template for comparisons
    return {tile_fn<S, Panel, kR + 1, kCount == 0 ? stream_panels(kR + 1) : kCount, kXStride, kLeaves>()...};
    // clang-format on
  }
  template <bool kLeaves>
  using Indices = std::make_index_sequence<kLeaves ? kFirstRows : kRows>;
  static constexpr auto kOne = table<1, 0, false>(Indices<false>()), kStream = table<0, 0, false>(Indices<false>());
  // Of a pass of several over the same panels.
  static TileFn pass(size_t row) {
    static constexpr auto kTiles = table<0, kPass, false>(Indices<false>());
    return kTiles[row];
  }
  template <int64_t kXStride, bool kLeaves>
  static constexpr std::array kMany{table<1, kXStride, kLeaves>(Indices<kLeaves>()),
                                    table<kPanels, kXStride, kLeaves>(Indices<kLeaves>())};
};

// Whether shifts of groups, times sums of x, are added to finished sums.
template <typename Weight>
constexpr bool kAddsShifts = [] {
  if constexpr (requires { Weight::kAddsShifts; }) return Weight::kAddsShifts;
  return false;
}();

// Rows of a tile that reads each weight once.
template <typename S, typename Weight>
constexpr int64_t kFewRowsOf = std::min<int64_t>(Tiles<S, typename Weight::Stream>::kRows, Weight::kStreamRows);

// Rows that pass over panels unless a tactic says otherwise.
template <typename S, typename Weight>
constexpr int64_t kPassRowsOf = [] {
  if constexpr (requires { Weight::kPassRows; }) return Weight::kPassRows;
  return kFewRowsOf<S, Weight>;
}();

// Asks for how the panels begin that follow `last`. What is asked for while one panel is read lies in the next one, and
// panels that are read side by side skip some.
template <typename S, typename Weight>
void prefetch_begins(const Weight& weight, const std::byte* last, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < Weight::kBeginBytes; at += kLineBytes)
      S::prefetch_far(last + (i + 1) * weight.panel_bytes() + at);
}

// Sums of few rows and of panels over all k: [panel][rows][16]. All rows are in one tile, so that each weight is read
// once, in order. More rows than a tile has pass over the same panels again, which L2 holds then. at_once: panels of a
// tile. scratch: kStreamBytes for each of them.
template <typename S, typename Weight>
void stream_sums(const Weight& weight, const float* x, int64_t x_stride, int64_t rows, int64_t k, int64_t group,
                 const std::byte* const* panels, int64_t count, int64_t at_once, float* sums, std::byte* scratch) {
  using T = Tiles<S, typename Weight::Stream>;
  const int64_t stride = rows * kPanel, passes = ceil_div(rows, kFewRowsOf<S, Weight>);
  for (int64_t p = 0, step; p < count; p += step) {
    step = at_once > 1 && count - p >= at_once ? at_once : 1;
    if constexpr (requires { Weight::kBeginBytes; })
      if (step > 1 && passes == 1) prefetch_begins<S>(weight, panels[p + step - 1], step);
    const auto multiply = [&](int64_t at, int64_t part) {
      const std::byte *lines[kMaxStreams], *beside[kMaxStreams], *next[kMaxStreams];
      for (int64_t i = 0; i < step; ++i) {
        lines[i] = weight.lines(panels[p + i], at, part, scratch + i * Weight::kStreamBytes);
        beside[i] = weight.beside(panels[p + i], at);
        next[i] = panels[p + step - 1] + (i + 1) * weight.panel_bytes();
      }
      const int64_t next_bytes = weight.panel_bytes() / passes;  // in a pass
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t first = rows * pass / passes, end = rows * (pass + 1) / passes;
        const auto last = static_cast<size_t>(end - first - 1);
        TileFn tile = (step > 1 ? T::kStream : T::kOne)[last];
        if constexpr (requires { Weight::kPassRows; })
          if (step > 1 && passes > 1) tile = T::pass(last);
        tile({.x = x + first * x_stride + at,
              .x_stride = x_stride,
              .panels = lines,
              .k = part,
              .sums = sums + p * stride + first * kPanel,
              .panel_stride = stride,
              .first = at == 0,
              .beside = beside,
              .begin = at,
              .group = group,
              .next = next,
              .next_step = ceil_div(next_bytes, ceil_div(k, Weight::Stream::kPerLine)),
              .compressed = compressed_of(weight)});
        for (int64_t i = 0; i < step; ++i) next[i] += next_bytes;
      }
    };
    for (int64_t at = 0; at < k; at += std::min(Weight::kStreamPart, k))
      multiply(at, std::min(Weight::kStreamPart, k - at));
  }
}

template <typename S, typename Weight>
void stream(const MatmulArgs& args, int64_t x_stride, const Team& team) {
  using T = Tiles<S, typename Weight::Stream>;
  const Weight weight(args);
  const auto scaled = weight.template sums<S>(args);
  const int64_t width = args.gated ? 2 : 1, bytes = weight.panel_bytes(), stride = args.rows * kPanel;
  const int64_t at_once = T::panels_at_once(args.rows), group = std::max<int64_t>(width, at_once);
  alignas(64) float sums[std::max<int64_t>(kMaxStreams * T::kRows, 2 * kPassRowsOf<S, Weight>) * kPanel];
  alignas(64) std::byte lines[kMaxStreams * Weight::kStreamBytes + 64];
  const auto some = [&](int64_t panel, int64_t count) {
    const std::byte* panels[kMaxStreams];
    for (int64_t p = 0; p < count; ++p) panels[p] = panel_at(args, panel + p, bytes);
    stream_sums<S>(weight, args.x, x_stride, args.rows, args.k, args.group, panels, count, at_once, sums, lines);
    if constexpr (kAddsShifts<Weight>)
      weight.template add_shifts<S>(
          panels, count, args.rows, [&](int64_t r) { return args.x + r * x_stride; }, sums, stride);
    epilogue<S>(args, 0, args.rows, panel, count, sums, stride, scaled);
  };
  share_panels(args, team, group, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel += group) some(panel, std::min(group, end - panel));
  });
}

// Many rows: blocks of rows x panels, cut along K so that a panel's part stays in L1 and the rows' part (copied, so
// that no two rows of it share cache sets) in L2. Sums rest in scratch between the parts.
template <typename S, typename Weight>
struct Blocked {
  using Panel = typename Weight::Blocked;
  using First = typename Weight::First;
  using T = Tiles<S, Panel>;
  static constexpr bool kWidens = !std::is_same_v<First, Panel>;
  static constexpr int64_t kRows = T::kRows;  // of a tile
  static constexpr int64_t kFirstRows = Tiles<S, First>::kFirstRows;
  static constexpr int64_t kPart = kBlockedK * Panel::kPerLine;  // k
  static constexpr int64_t kXStride = kPart + kPanel;            // floats
  static constexpr int64_t kMaxRows = S::kRegisters >= 32 ? 11 * kRows : 96 / kRows * kRows;
  static constexpr int64_t kMaxPanels = S::kRegisters >= 32 ? 64 : 32;

  static constexpr auto &kFirst = Tiles<S, First>::template kMany<kXStride, kWidens>,
                        &kOther = T::template kMany<kXStride, false>;

  // For parts of x, then lines.
  static constexpr size_t scratch(int64_t rows) {
    constexpr int64_t kLines = T::kPanels * (Weight::kBlockedBytes + Weight::kStreamBytes);
    return static_cast<size_t>(rows * kXStride) * sizeof(float) + static_cast<size_t>(kLines);
  }

  // Sums of rows x panels to [panel][row][16]. row_of(row): its x; at(panel): where it lies; after: the panel that will
  // probably be multiplied next, or null.
  template <typename RowOf, typename PanelAt>
  static void sums(const Weight& weight, int64_t k, int64_t group, int64_t rows, const RowOf& row_of, int64_t panels,
                   const PanelAt& at, const std::byte* after, float* to, std::byte* scratch) {
    float* const x = reinterpret_cast<float*>(scratch);
    std::byte* const widened = reinterpret_cast<std::byte*>(x + rows * kXStride);
    std::byte* const narrow = widened + T::kPanels * Weight::kBlockedBytes;
    const int64_t first_rows = std::min(kFirstRows, ceil_div(rows, ceil_div(rows, kRows)));
    const int64_t others = ceil_div(rows - first_rows, kRows), tiles = 1 + others, stride = rows * kPanel;
    for (int64_t begin = 0; begin < k; begin += kPart) {
      const int64_t part = std::min(kPart, k - begin);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(x + r * kXStride, row_of(r) + begin, static_cast<size_t>(part) * sizeof(float));
      for (int64_t p = 0, step; p < panels; p += step) {
        step = panels - p >= T::kPanels ? T::kPanels : 1;
        const std::byte *lines[T::kPanels], *next[T::kPanels];
        const std::byte* beside[T::kPanels];
        for (int64_t i = 0; i < step; ++i) {
          beside[i] = weight.beside(at(p + i), begin);
          lines[i] = weight.lines(at(p + i), begin, part, narrow + i * Weight::kStreamBytes);
          if constexpr (requires { weight.compressed; })
            weight.prefetch_header(at(std::min(p + step + i, panels - 1)), begin);
          if (p + 2 * step <= panels) {
            next[i] = weight.stored(at(p + step + i), begin);
          } else {
            next[i] = begin + part < k || after == nullptr ? weight.stored(at(i), std::min(begin + part, k - 1))
                                                           : weight.stored(after + i * weight.panel_bytes(), 0);
          }
        }
        const int64_t next_bytes = Weight::stored_bytes(part) / tiles;  // while a tile is made
        for (int64_t i = 0; i < tiles; ++i) {
          const int64_t r = i == 0 ? 0 : first_rows + (rows - first_rows) * (i - 1) / others;
          const int64_t end = i == 0 ? first_rows : first_rows + (rows - first_rows) * i / others;
          const bool first = kWidens && i == 0;
          const int64_t per_line = first ? First::kPerLine : Panel::kPerLine;
          const TileArgs tile{.x = x + r * kXStride,
                              .x_stride = kXStride,
                              .panels = lines,
                              .k = part,
                              .sums = to + p * stride + r * kPanel,
                              .panel_stride = stride,
                              .first = begin == 0,
                              .beside = beside,
                              .begin = begin,
                              .group = group,
                              .next = next,
                              .next_step = ceil_div(next_bytes, ceil_div(part, per_line)),
                              .widened = reinterpret_cast<float*>(widened),
                              .widened_stride = Weight::kBlockedBytes / int64_t{sizeof(float)},
                              .compressed = compressed_of(weight)};
          const auto last = static_cast<size_t>(end - r - 1);
          (first ? kFirst[step > 1][last] : kOther[step > 1][last])(tile);
          for (int64_t each = 0; each < step; ++each) {
            if (first) lines[each] = widened + each * Weight::kBlockedBytes;
            next[each] += next_bytes;
          }
        }
      }
    }
  }
};

template <typename S, typename Weight>
void blocked(const MatmulArgs& args, int64_t x_stride, const Team& team) {
  using B = Blocked<S, Weight>;
  const Weight weight(args);
  const auto scaled = weight.template sums<S>(args);
  const BlockLimits limits = block_limits(args, kPassRowsOf<S, Weight>, B::kMaxRows, B::kMaxPanels);
  const Blocks blocks = cut(args, team.count, B::kRows, limits);
  const int64_t bytes = weight.panel_bytes(), num_sums = limits.panels * kPanel * limits.rows;
  const size_t scratch = static_cast<size_t>(num_sums) * sizeof(float) + B::scratch(limits.rows);
  float* const sums = reinterpret_cast<float*>(team.scratch(scratch));
  const int64_t items = blocks.count();
  for (int64_t item = team.next_of_shares(items); item < items; item = team.next_of_shares(items)) {
    const int64_t row = blocks.row_block(item) * blocks.rows, panel = blocks.first_panel(item);
    const int64_t rows = std::min(blocks.rows, args.rows - row),
                  panels = std::min(blocks.panels, args.num_panels - panel);
    const int64_t next = std::min(blocks.first_panel(item + 1), args.num_panels - 1);
    B::sums(
        weight, args.k, args.group, rows, [&](int64_t r) { return args.x + (row + r) * x_stride; }, panels,
        [&](int64_t p) { return panel_at(args, panel + p, bytes); }, panel_at(args, next, bytes), sums,
        reinterpret_cast<std::byte*>(sums + num_sums));
    if constexpr (kAddsShifts<Weight>) {
      const std::byte* places[B::kMaxPanels];
      for (int64_t p = 0; p < panels; ++p) places[p] = panel_at(args, panel + p, bytes);
      weight.template add_shifts<S>(
          places, panels, rows, [&](int64_t r) { return args.x + (row + r) * x_stride; }, sums, rows * kPanel);
    }
    epilogue<S>(args, row, rows, panel, panels, sums, rows * kPanel, scaled);
  }
}

template <typename S, typename Weight>
void matmul_of(const MatmulArgs& args, int64_t x_stride, const Team& team) {
  if (passes_over_panels(args, kPassRowsOf<S, Weight>)) {
    stream<S, Weight>(args, x_stride, team);
  } else {
    blocked<S, Weight>(args, x_stride, team);
  }
}

template <typename S, typename Weight>
void matmul(const MatmulArgs& args, const Team& team) {
  matmul_of<S, Weight>(args, args.k, team);
}

}  // namespace
}  // namespace ingot
