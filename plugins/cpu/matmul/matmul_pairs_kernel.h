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

// Four pairs of bf16c, without patches.
struct PanelCompressed {
  static constexpr int64_t kPerLine = 4;
  static constexpr int64_t kBytes = Bf16c::kBlockBytes;
  static constexpr int64_t kMostRows = 10;         // of products that never leave its lines restored
  static constexpr int64_t kMostFirstRows = 8;     // of a tile that leaves them
  static constexpr int streams(int) { return 2; }  // one would wait for each sum

  template <typename S>
  static typename S::UpperBytes tables(const std::byte* panel) {
    return S::upper_bytes(panel);
  }
  template <typename S, int kK>
  [[gnu::always_inline]] static inline typename S::V load(const std::byte* line, typename S::UpperBytes upper) {
    return S::template restored_pairs<kK>(line, upper);
  }
};

// bf16c. Few rows multiply its lines as they are, and so does the first tile of many, which leaves them as bf16 has
// them. Tiles of weights with patches are restored before that.
template <typename S>
struct CompressedWeight : PairsWeight {
  using Stream = PanelCompressed;
  using First = PanelCompressed;
  static constexpr int64_t kStreamRows = PanelCompressed::kMostRows;
  static constexpr int64_t kPatchedK = Bf16c::kTileK / 2;  // pairs of a tile
  static constexpr int64_t kStreamBytes = Bf16c::kRestoredBytes;
  static constexpr int64_t kBlockedBytes = kBlockedK * kLineBytes;
  Bf16c format;

  template <typename Args>
  explicit CompressedWeight(const Args& args) : PairsWeight(args), format(2 * args.k) {}
  int64_t panel_bytes() const { return format.panel_bytes(); }
  const std::byte* lines(const std::byte* panel, int64_t at, int64_t, std::byte*) const { return stored(panel, at); }
  const std::byte* stored(const std::byte* panel, int64_t at) const { return format.stored(panel, at / kPatchedK); }
  static int64_t stored_bytes(int64_t part) { return ceil_div(part, kPatchedK) * Bf16c::kTileBytes; }
  static const std::byte* beside(const std::byte* panel, int64_t) { return panel; }
  // Finds the first tile with patches, from pair `at` on, and returns its first pair. If no tile has any, returns where
  // the last tile ends.
  int64_t patched(const std::byte* panel, int64_t at) const {
    return format.patched(panel, at / kPatchedK) * kPatchedK;
  }
  // Asks for what `patched` reads from there on.
  void prefetch_header(const std::byte* panel, int64_t at) const { format.prefetch_header<S>(panel, at / kPatchedK); }
  void restore(const std::byte* panel, int64_t at, std::byte* to) const {
    format.restore<S>(panel, at / kPatchedK, to);
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

inline size_t matmul_pairs_scratch(const void* args) {
  const auto& matmul = *static_cast<const MatmulArgs*>(args);
  return static_cast<size_t>(matmul.rows * pairs_of(matmul.k)) * sizeof(float);
}

template <typename S, typename Weight>
void matmul_pairs(const MatmulArgs& args, const Team& team) {
  const int64_t pairs = pairs_of(args.k);
  const OwnOrShared place(args, team);
  float* const rounded = reinterpret_cast<float*>(place.memory(matmul_pairs_scratch(&args)));
  const RowsOfX row_of(args, team);
  const Team::Range mine = place.share(args.rows);
  for (int64_t row = mine.begin; row < mine.end; ++row) round_to_pairs<S>(row_of(row), args.k, rounded + row * pairs);
  place.wait();
  MatmulArgs product = args;
  product.x = rounded;
  product.k = pairs;
  product.norm = nullptr;
  matmul<S, Weight>(product, team);
}

// Products of experts: a thread rounds the rows of an expert before it multiplies them.
template <typename S, typename Weight>
class PairsProduct {
  using Product = VectorProduct<S, Weight>;

 public:
  static constexpr int64_t kFewRows = Product::kFewRows, kMaxRows = Product::kMaxRows, kMaxPanels = Product::kMaxPanels;

  static size_t scratch(const MoeMatmulArgs& args) { return rounded_bytes(args) + Product::scratch(in_pairs(args)); }

  PairsProduct(const MoeMatmulArgs& args, std::byte* memory)
      : k_(args.k),
        rounded_(reinterpret_cast<float*>(memory)),
        product_(in_pairs(args), memory + rounded_bytes(args)) {}

  int64_t panel_bytes() const { return product_.panel_bytes(); }

  void set_rows(const float* const* rows, int64_t count) {
    for (int64_t row = 0; row < count; ++row) {
      rows_[row] = rounded_ + row * pairs_of(k_);
      round_to_pairs<S>(rows[row], k_, rounded_ + row * pairs_of(k_));
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
    return static_cast<size_t>(ceil_div(most * pairs_of(args.k) * 4, kLineBytes) * kLineBytes);
  }

  int64_t k_;
  float* rounded_;
  const float* rows_[kMaxRows];
  Product product_;
};

}  // namespace
}  // namespace ingot
