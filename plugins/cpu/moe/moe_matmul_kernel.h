// Products of experts on vectors: every output is one sum, fed by one fma per k in ascending order, as in
// matmul_kernel.h, whose tiles do the work; the slots that take an expert are gathered first.
//
// Floors: the weights of the experts that some row takes, over the bandwidth of memory; 2 * slots * N * K operations.
#pragma once

#include <cstring>

#include "matmul/matmul_kernel.h"
#include "moe/moe_matmul_parts.h"

namespace ingot {
namespace {

template <typename S, typename Weight>
class VectorProduct {
  using Few = Tiles<S, typename Weight::Stream>;
  using Many = Blocked<S, Weight>;

 public:
  static constexpr int64_t kFewRows = Few::kRows, kMaxRows = Many::kMaxRows, kMaxPanels = Many::kMaxPanels;

  static size_t scratch(const MoeMatmulArgs& args) {
    const size_t few = static_cast<size_t>(kStreamedRows * args.k) * sizeof(float);
    return static_cast<size_t>(kMaxPanels * kPanel * kMaxRows) * sizeof(float) + kLinesBytes +
           std::max(few, Many::scratch(kMaxRows));
  }

  VectorProduct(const MoeMatmulArgs& args, std::byte* memory)
      : weight_(args),
        k_(args.k),
        group_(args.group),
        lines_(memory),
        sums_(reinterpret_cast<float*>(memory + kLinesBytes)),
        x_(sums_ + kMaxPanels * kPanel * kMaxRows) {}

  int64_t panel_bytes() const { return weight_.panel_bytes(); }

  void set_rows(const float* const* rows, int64_t count) {
    rows_ = rows;
    count_ = count;
    if (count > kStreamedRows) return;
    few_ = count == 1 ? rows[0] : x_;
    for (int64_t r = 0; r < count && count > 1; ++r)
      std::memcpy(x_ + r * k_, rows[r], static_cast<size_t>(k_) * sizeof(float));
  }

  void multiply(const std::byte* const* panels, int64_t count) {
    if (count_ <= kStreamedRows) {
      stream(panels, count);
    } else {
      Many::sums(
          weight_, k_, group_, count_, [this](int64_t r) { return rows_[r]; }, count,
          [panels](int64_t p) { return panels[p]; }, nullptr, sums_, reinterpret_cast<std::byte*>(x_));
    }
    if constexpr (kAddsShifts<Weight>)
      weight_.template add_shifts<S>(panels, count, count_, [this](int64_t r) { return rows_[r]; }, sums_, stride());
    if constexpr (Weight::kScaled) scale_sums<S>(panels, count, count_, sums_, stride(), nullptr);
  }
  const float* sums() const { return sums_; }
  int64_t stride() const { return count_ * kPanel; }

 private:
  static constexpr int64_t kStreamedRows = kFewRowsOf<S, Weight>;  // of an expert, at most
  static constexpr size_t kLinesBytes = static_cast<size_t>(kMaxStreams * Weight::kStreamBytes);

  // All rows in one tile over the whole K, so that each weight is read once, in order.
  void stream(const std::byte* const* panels, int64_t count) {
    const int64_t at_once = Few::panels_at_once(count_);
    stream_sums<S>(weight_, few_, k_, count_, k_, group_, panels, count, at_once, sums_, lines_);
  }

  Weight weight_;
  int64_t k_, group_, count_ = 0;
  std::byte* lines_;
  float *sums_, *x_;
  const float* const* rows_ = nullptr;
  const float* few_ = nullptr;
};

}  // namespace
}  // namespace ingot
