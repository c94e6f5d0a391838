// Products of bf16 by the CPU's own dot product: x is rounded to bf16, and every output is one sum, started at 0 and
// fed with a pair of k per instruction, k ascending, whatever the blocking. A pair of bf16 numbers has the size of a
// float32 and its lines are those of bf16 panels as they are stored, so the tiles of matmul_kernel.h multiply them as K
// / 2 elements; S::accumulate takes both products of a pair.
//
// Floors: 2 * N * K bytes of weights over the bandwidth of memory, 2 * rows * N * K operations over the peak of the dot
// product, which on AMD is twice that of fma.
#pragma once

#include <algorithm>

#include "matmul/compressed.h"
#include "matmul/matmul_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
namespace {

// A line of a bf16 panel: one pair of k of 16 columns.
struct PanelPairs {
  static constexpr int64_t kPerLine = 1;  // pairs
  static constexpr int64_t kBytes = kLineBytes;
  static int64_t bytes(int64_t pairs) { return PanelBf16::bytes(2 * pairs); }

  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, int column) {
    return S::load(reinterpret_cast<const float*>(line) + column);
  }
};

struct PairsWeight : FloatWeight<PanelPairs> {
  static constexpr int64_t kStreamRows = 12;  // a pair takes one operation of each: more rows keep memory waiting
  using FloatWeight<PanelPairs>::FloatWeight;
};

// Four pairs of bf16c.
struct PanelCompressed {
  static constexpr int64_t kPerLine = 4;
  static constexpr int64_t kBytes = Bf16c::kBlockBytes;
  static constexpr int64_t kTilePairs = Bf16c::kTileK / 2;
  static constexpr int64_t kMostRows = 12;         // of a tile that does not leave its lines restored
  static constexpr int64_t kMostFirstRows = 8;     // of a tile that leaves them
  static constexpr int64_t kRowsInOrder = 10;      // of which memory, not sums, sets the pace
  static constexpr int streams(int) { return 2; }  // one waits for each sum, which takes longer than fast memory
  static int64_t streams_here(int64_t rows) { return rows <= kRowsInOrder && reads_in_order() ? 1 : 2; }

  // What `tile` of matmul_kernel.h is. Where a panel has patches, the tiles of all panels are restored first.
  template <typename S, int kRows, int kPanels, int64_t kXStride, bool kLeaves>
  static void tile(const TileArgs& args) {
    using V = typename S::V;
    constexpr bool kAsksNext = kXStride != 0;
    const Bf16c& format = *args.compressed;
    const int64_t x_stride = kXStride > 0 ? kXStride : args.x_stride;
    const std::byte *line[kPanels], *next[kPanels], *patched[kPanels];
    typename S::UpperBytes upper[kPanels];
    V sum[kRows][kPanels];
    float* left = args.widened;
    const auto sums_at = [&](int r, int p) { return args.sums + p * args.panel_stride + r * kPanel; };
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      line[p] = args.panels[p];
      if (kAsksNext) next[p] = args.next[p];
      upper[p] = S::upper_bytes(args.beside[p]);
      patched[p] = format.patched(args.beside[p], line[p]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) sum[r][p] = args.first ? S::zero() : S::load(sums_at(r, p));

    const auto next_line = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        if constexpr (kAsksNext) {
          S::prefetch_far(next[p]);
          S::prefetch_far(next[p] + kLineBytes);
          next[p] += args.next_step;
        } else {
#pragma GCC unroll 3
          for (int64_t at = 0; at < kBytes; at += kLineBytes) {
            if constexpr (kPanels > 1) {  // the CPU's own prefetching, if it is good, finds both
              S::prefetch(line[p] + at + (kRows <= 6 ? ahead_of_reading(4096) : 2048));
            } else if constexpr (kRows > 1) {
              S::prefetch_stream(line[p] + at);
            } else {
              S::prefetch(line[p] + at + ahead_in_order(4096));
            }
          }
        }
        line[p] += kBytes;
      }
    };
    const auto add_line = [&](const float* x) __attribute__((always_inline)) {
      for_each(std::make_integer_sequence<int, kPerLine>(), [&]<int kPair>() __attribute__((always_inline)) {
        V weight[kPanels][1];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
          weight[p][0] = S::template restored_pairs<kPair>(line[p], upper[p]);
          if constexpr (kLeaves) S::store(left + p * args.widened_stride + kPair * kPanel, weight[p][0]);
        }
        add_products<S>(sum, x + kPair, x_stride, weight);
      });
      next_line();
      if constexpr (kLeaves) left += kPerLine * kPanel;
    };
    // The pairs of a tile of which a panel has patches, or those of the last line.
    const auto add_restored = [&](const float* x, int64_t pairs) __attribute__((always_inline)) {
      alignas(kLineBytes) float own[kLeaves ? 1 : kPanels * kTilePairs * kPanel];
      float* const to = kLeaves ? left : own;
      const int64_t stride = kLeaves ? args.widened_stride : kTilePairs * kPanel;
      const std::byte* begin[kPanels];
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) begin[p] = line[p];
      for (int64_t at = 0; at < pairs; at += kPerLine) {
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p)
          for_each(std::make_integer_sequence<int, kPerLine>(), [&]<int kPair>() __attribute__((always_inline)) {
            S::store(to + p * stride + (at + kPair) * kPanel, S::template restored_pairs<kPair>(line[p], upper[p]));
          });
        next_line();
      }
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p)
        if (begin[p] == patched[p]) {
          format.patch(args.beside[p], begin[p], to + p * stride);
          patched[p] = format.patched(args.beside[p], begin[p] + Bf16c::kTileBytes);
        }
      for (int64_t at = 0; at < pairs; ++at) {
        V weight[kPanels][1];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) weight[p][0] = S::load(to + p * stride + at * kPanel);
        add_products<S>(sum, x + at, x_stride, weight);
      }
      if constexpr (kLeaves) left += ceil_div(pairs, kPerLine) * kPerLine * kPanel;
    };

    const float* x = args.x;
    for (int64_t pairs = args.k, step; pairs > 0; pairs -= step, x += step) {
      bool patches = false;
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) patches = patches || line[p] == patched[p];
      step = patches ? std::min(kTilePairs, pairs) : std::min(kPerLine, pairs);
      if (step == kPerLine && !patches) [[likely]]
        add_line(x);
      else
        add_restored(x, step);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) S::store(sums_at(r, p), sum[r][p]);
  }
};

// bf16c. Few rows multiply its lines as they are, in passes if they need several tiles: beside products, AMD's CPUs
// restore a line sooner than they store it. Of many rows, the first tile leaves lines as bf16 has them.
template <typename S>
struct CompressedWeight : PairsWeight {
  using Stream = PanelCompressed;
  using First = PanelCompressed;
  static constexpr int64_t kStreamRows = PanelCompressed::kMostRows, kPassRows = 3 * kStreamRows;
  static constexpr int64_t kTilePairs = PanelCompressed::kTilePairs;
  static constexpr int64_t kBeginBytes = 2560;  // of a panel: a header, and as much as a tile asks for ahead
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  Bf16c compressed;

  template <typename Args>
  explicit CompressedWeight(const Args& args) : PairsWeight(args), compressed(2 * args.k) {}
  int64_t panel_bytes() const { return compressed.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const { return stored(panel, at); }
  const std::byte* stored(const std::byte* panel, int64_t at) const {
    return compressed.stored(panel, at / kTilePairs);
  }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, kTilePairs) * Bf16c::kTileBytes; }
  static const std::byte* beside(const std::byte* panel, int64_t) { return panel; }
  // Asks for what says which tiles from there on have patches.
  void prefetch_header(const std::byte* panel, int64_t at) const {
    compressed.prefetch_header<S>(panel, at / kTilePairs);
  }
};

inline int64_t pairs_of(int64_t k) { return ceil_div(k, 2); }

// Rounds a row to pairs. Behind an odd K stands a zero.
template <typename S>
void round_to_pairs(const float* x, int64_t k, float* to) {
  static_assert(S::kWidth == kPanel);
  for (int64_t at = 0; at < k; at += 2 * S::kWidth, to += S::kWidth) {
    const int64_t left = k - at;
    const auto first = load_lanes<S>(x + at, left);
    const auto second = left > S::kWidth ? load_lanes<S>(x + at + S::kWidth, left - S::kWidth) : S::zero();
    store_lanes<S>(to, S::round_pairs(first, second), pairs_of(left));
  }
}

// Floats from a rounded row to the next: an odd number of lines, so that the rows do not meet in the same sets of L1.
inline int64_t stride_of(int64_t pairs) {
  constexpr int64_t kFloats = kLineBytes / int64_t{sizeof(float)};
  return (ceil_div(pairs, kFloats) | 1) * kFloats;
}

// Floats of a rounded row; sums of x, one for each group, lie behind its pairs where a weight asks for them.
template <typename Weight, typename Args>
int64_t row_floats(const Args& args) {
  const int64_t pairs = pairs_of(args.k);
  if constexpr (kAddsShifts<Weight>) return pairs + ceil_div(args.k, args.group);
  return pairs;
}

template <typename Weight>
size_t matmul_pairs_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  return static_cast<size_t>(matmul.rows * stride_of(row_floats<Weight>(matmul))) * sizeof(float);
}

// Rounds a row of row_floats. Its sums are those of the rounded numbers.
template <typename S, typename Weight, typename Args>
void round_row_to_pairs(const Args& args, const float* x, float* to) {
  round_to_pairs<S>(x, args.k, to);
  if constexpr (kAddsShifts<Weight>) {
    const int64_t pairs = pairs_of(args.k), group = args.group / 2;
    const auto ones = S::round_pairs(S::set1(1.0f), S::set1(1.0f));
    float* sums = to + pairs;
    for (int64_t begin = 0; begin < pairs; begin += group) {
      const int64_t end = std::min(begin + group, pairs);
      auto sum = S::zero();
      for (int64_t at = begin; at < end; at += S::kWidth) S::accumulate(sum, load_lanes<S>(to + at, end - at), ones);
      *sums++ = S::reduce_add(sum);
    }
  }
}

template <typename S, typename Weight>
void matmul_pairs(const MatmulArgs& args, const Team& team) {
  const int64_t pairs = pairs_of(args.k), stride = stride_of(row_floats<Weight>(args));
  const OwnOrShared place(args, team);
  float* const rounded = reinterpret_cast<float*>(place.memory(matmul_pairs_scratch<Weight>(&args)));
  const RowsOfX row_of(args, team);
  const Team::Range mine = place.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row)
    round_row_to_pairs<S, Weight>(args, row_of(row), rounded + row * stride);
  place.wait();
  MatmulArgs product = args;
  product.x = rounded;
  product.k = pairs;
  product.norm = nullptr;
  matmul_of<S, Weight>(product, stride, team);
}

// Products of experts: a thread rounds the rows of an expert before it multiplies them.
template <typename S, typename Weight>
class PairsProduct {
  using Product = VectorProduct<S, Weight>;

 public:
  static constexpr int64_t kFewRows = Product::kFewRows, kMaxRows = Product::kMaxRows, kMaxPanels = Product::kMaxPanels;

  static size_t scratch(const MoeMatmulArgs& args) { return rounded_bytes(args) + Product::scratch(in_pairs(args)); }

  PairsProduct(const MoeMatmulArgs& args, std::byte* memory)
      : args_(args),
        row_floats_(row_floats<Weight>(args)),
        rounded_(reinterpret_cast<float*>(memory)),
        product_(in_pairs(args), memory + rounded_bytes(args)) {}

  int64_t panel_bytes() const { return product_.panel_bytes(); }

  void set_rows(const float* const* rows, int64_t count) {
    for (int64_t row = 0; row < count; ++row) {
      round_row_to_pairs<S, Weight>(args_, rows[row], rounded_ + row * row_floats_);
      rows_[row] = rounded_ + row * row_floats_;
    }
    product_.set_rows(rows_, count);
  }

  void multiply(const std::byte* const* panels, int64_t count) { product_.multiply(panels, count); }
  const float* sums() const { return product_.sums(); }
  int64_t stride() const { return product_.stride(); }

 private:
  static MoeMatmulArgs in_pairs(MoeMatmulArgs args) {
    args.k = pairs_of(args.k);
    return args;
  }
  static size_t rounded_bytes(const MoeMatmulArgs& args) {
    const int64_t most = std::min(kMaxRows, args.rows * args.slots);
    return static_cast<size_t>(ceil_div(most * row_floats<Weight>(args) * 4, kLineBytes) * kLineBytes);
  }

  const MoeMatmulArgs& args_;
  int64_t row_floats_;
  float* rounded_;
  const float* rows_[kMaxRows];
  Product product_;
};

}  // namespace
}  // namespace ingot
