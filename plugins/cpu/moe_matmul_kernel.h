// Products of experts on vectors: every output is one sum, fed by one fma per k in ascending order, as in
// matmul_kernel.h, whose tiles do the work; the slots that take an expert are gathered first.
//
// Floors: the weights of the experts that some row takes, over the bandwidth of memory; 2 * slots * N * K operations.
#pragma once

#include <cstring>

#include "matmul_kernel.h"
#include "moe_matmul_parts.h"

namespace ingot {
namespace {

template <typename S, typename Panel>
class VectorProduct {
  using T = Tiles<S, Panel>;
  static constexpr int64_t kPartBytes = 256 * kLineBytes, kPart = 256 * Panel::kPerLine;  // of a panel; k

 public:
  static constexpr int64_t kFewRows = T::kRows, kMaxRows = 96 / T::kRows * T::kRows, kMaxPanels = 32;

  static int64_t panel_bytes(int64_t k) { return Panel::bytes(k); }
  static size_t scratch(int64_t k) {
    const int64_t x = std::max(kMaxRows * kPart, kFewRows * k);
    return static_cast<size_t>(kMaxPanels * kPanel * kMaxRows + x) * sizeof(float);
  }

  VectorProduct(std::byte* memory, int64_t k)
      : k_(k), sums_(reinterpret_cast<float*>(memory)), x_(sums_ + kMaxPanels * kPanel * kMaxRows) {}

  void set_rows(const float* const* rows, int64_t count) {
    rows_ = rows;
    count_ = count;
    if (count > kFewRows) return;
    few_ = count == 1 ? rows[0] : x_;
    for (int64_t r = 0; r < count && count > 1; ++r)
      std::memcpy(x_ + r * k_, rows[r], static_cast<size_t>(k_) * sizeof(float));
  }

  void multiply(const std::byte** panels, int64_t count) {
    count_ <= kFewRows ? stream(panels, count) : blocked(panels, count);
  }
  const float* sums() const { return sums_; }
  int64_t stride() const { return count_ * kPanel; }

 private:
  // All rows in one tile over the whole K, so that each weight is read once, in order.
  void stream(const std::byte* const* panels, int64_t count) {
    const int64_t at_once = T::stream_panels(static_cast<int>(count_));
    const auto row = static_cast<size_t>(count_ - 1);
    for (int64_t p = 0, step; p < count; p += step) {
      step = count - p >= at_once ? at_once : 1;
      (step == at_once ? T::kStream : T::kOne)[row](
          {few_, k_, panels + p, k_, sums_ + p * stride(), stride(), true, 2048});
    }
  }

  // Cut along K, so that a panel's part stays in L1 and the rows' part in L2; sums rest in between.
  void blocked(const std::byte** panels, int64_t count) {
    const int64_t tiles = ceil_div(count_, T::kRows);
    for (int64_t k = 0; k < k_; k += kPart) {
      const int64_t part = std::min(kPart, k_ - k);
      for (int64_t r = 0; r < count_; ++r)
        std::memcpy(x_ + r * part, rows_[r] + k, static_cast<size_t>(part) * sizeof(float));
      for (int64_t p = 0, step; p < count; p += step) {
        step = count - p >= T::kPanels ? T::kPanels : 1;
        const std::byte* next = p + step < count ? panels[p + step] : panels[0] + kPartBytes;  // read it ahead
        for (int64_t i = 0; i < tiles; ++i) {
          const int64_t r = count_ * i / tiles, end = count_ * (i + 1) / tiles;
          (step == 1 ? T::kOne : T::kFull)[static_cast<size_t>(end - r - 1)](
              {x_ + r * part, part, panels + p, part, sums_ + p * stride() + r * kPanel, stride(), k == 0,
               next - panels[p]});
        }
      }
      for (int64_t p = 0; p < count; ++p) panels[p] += kPartBytes;
    }
  }

  int64_t k_, count_ = 0;
  float *sums_, *x_;
  const float* const* rows_ = nullptr;
  const float* few_ = nullptr;
};

}  // namespace
}  // namespace ingot
