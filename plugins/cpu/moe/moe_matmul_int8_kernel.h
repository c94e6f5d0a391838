// Products of quantised experts with rows that are rounded to int8, as in matmul_int8_kernel.h, whose tiles do the
// work: sums are exact, so that every number of rows gives the same bits. The rows that take an expert are rounded
// where its panels are multiplied, which costs K operations of each row's N * K.
#pragma once

#include "matmul/matmul_int8_kernel.h"
#include "moe/moe_matmul_parts.h"

namespace ingot {
namespace {

template <typename I, typename Format, typename Products>
class Int8Product {
 public:
  static constexpr int64_t kFewRows = Products::kRows, kMaxRows = Products::kBlockRows;
  static constexpr int64_t kMaxPanels = Products::kBlockPanels;

  static size_t scratch(const MoeMatmulArgs& args) {
    return kSumBytes + kUnpackedBytes + static_cast<size_t>(RoundedRows{kMaxRows, args.k, nullptr}.bytes());
  }

  Int8Product(const MoeMatmulArgs& args, std::byte* memory)
      : format_(args),
        rows_{0, args.k, memory + kSumBytes + kUnpackedBytes, Products::run_k(args.group)},
        sums_(reinterpret_cast<int32_t*>(memory)),
        unpacked_(memory + kSumBytes) {}

  int64_t panel_bytes() const { return format_.panel_bytes(); }

  void set_rows(const float* const* rows, int64_t count) {
    rows_.rows = count;
    const RowGroups groups{count, Products::kRows};
    for (int64_t g = 0; g < groups.count(); ++g)
      Products::round(rows_, groups.first(g), groups.first(g + 1) - groups.first(g), rows + groups.first(g));
  }

  void multiply(const std::byte* const* panels, int64_t count) {
    const int64_t groups = RowGroups{rows_.rows, Products::kRows}.count();
    int8_sums<Format, Products>(
        format_, rows_, 0, groups, count, [panels](int64_t p) { return panels[p]; }, nullptr, sums_, unpacked_);
    scale_sums<I>(panels, count, rows_.rows, reinterpret_cast<typename Products::Total*>(sums_), stride(),
                  rows_.scales());
  }
  const float* sums() const { return reinterpret_cast<const float*>(sums_); }
  int64_t stride() const { return rows_.rows * kPanel; }

 private:
  static constexpr size_t kSumBytes = kMaxPanels * kPanel * kMaxRows * sizeof(int32_t);
  static constexpr size_t kUnpackedBytes = static_cast<size_t>(Products::kPanels * Products::kUnpackedBytes);

  Format format_;
  RoundedRows rows_;
  int32_t* sums_;
  std::byte* unpacked_;
};

template <typename I, typename Format>
using ByteProduct = Int8Product<I, Format, ByteProducts<I, Format>>;

template <typename I, int64_t kRun>
using CodeProduct = Int8Product<I, W4, CodeProducts<I, kRun>>;

// One product of up to kRows rows, another of more, as each block of an expert's rows has them; their bits are the
// same.
template <int64_t kRows, typename Few, typename Many>
class FewOrMany {
 public:
  static constexpr int64_t kFewRows = Many::kFewRows, kMaxRows = Many::kMaxRows, kMaxPanels = Many::kMaxPanels;
  static_assert(kRows <= Few::kMaxRows && kMaxPanels <= Few::kMaxPanels);

  static size_t scratch(const MoeMatmulArgs& args) { return std::max(Few::scratch(args), Many::scratch(args)); }

  FewOrMany(const MoeMatmulArgs& args, std::byte* memory) : few_(args, memory), many_(args, memory) {}

  int64_t panel_bytes() const { return many_.panel_bytes(); }
  void set_rows(const float* const* rows, int64_t count) {
    are_few_ = count <= kRows;
    are_few_ ? few_.set_rows(rows, count) : many_.set_rows(rows, count);
  }
  void multiply(const std::byte* const* panels, int64_t count) {
    are_few_ ? few_.multiply(panels, count) : many_.multiply(panels, count);
  }
  const float* sums() const { return are_few_ ? few_.sums() : many_.sums(); }
  int64_t stride() const { return are_few_ ? few_.stride() : many_.stride(); }

 private:
  Few few_;
  Many many_;
  bool are_few_ = false;
};

// int4 with AVX-512, as matmul_w4a8.
template <typename I, int64_t kRun>
using CodeOrByteProduct = FewOrMany<I::template kMaxCodeRows<kRun>, CodeProduct<I, kRun>, ByteProduct<I, W4>>;

// By the size of groups, as matmul_codes.
template <typename I, template <int64_t> typename Product>
void moe_gate_up_codes(const MoeMatmulArgs& args, const Team& team) {
  with_run<I>(args.group, [&]<int64_t kRun>() { moe_gate_up<I, Product<kRun>>(args, team); });
}

template <typename I, template <int64_t> typename Product>
void moe_down_codes(const MoeMatmulArgs& args, const Team& team) {
  with_run<I>(args.group, [&]<int64_t kRun>() { moe_down<I, Product<kRun>>(args, team); });
}

}  // namespace
}  // namespace ingot
