#include "execution/binder.h"
#include "matmul/screened_matmul_args.h"
#include "threads/threads.h"

namespace ingot {
namespace {

static_assert(ThreadPool::kMaxThreads <= kScreenThreads);

constexpr std::string_view kCodes = kW4.dtype;  // see plugins/ops/screened_matmul.py
constexpr int64_t kCodesGroup = 128;

// Of the weight's pieces, which stay where they are. attribute: names the kernel.
ProductCall bind_product(const Binder& step, const char* attribute, const WeightSpec* weight, int64_t group, float* y,
                         std::span<const WeightSlice> pieces) {
  const Kernel* kernel = step.runnable_kernel(step.attr_word(attribute));
  step.check(kernel->op() == "matmul" && kernel->dtype() == weight->dtype + "a8",
             std::string("kernel ") + kernel->name + " does not multiply " + weight->dtype + " with int8");
  return {.run = kernel->run,
          .scratch = kernel->scratch,
          .args = MatmulArgs{.x = nullptr,
                             .pieces = pieces.data(),
                             .num_pieces = std::ssize(pieces),
                             .num_panels = num_panels_of(weight->shape[0], false),
                             .bias = nullptr,
                             .residual = nullptr,
                             .y = y,
                             .rows = 0,
                             .n = weight->shape[0],
                             .k = weight->shape[1],
                             .activation = Activation::kNone,
                             .gated = false,
                             .group = group}};
}

void bind_screened_matmul(const Binder& step, BoundStep& bound) {
  step.bind_form(bound, 6, 4, *step.runnable_kernel(step.attr_word("product")));
  const std::vector<std::string>& inputs = step.spec().inputs;
  const WeightSpec* weight = step.product_weight(inputs[1], 2, false);
  const int64_t n = weight->shape[0], k = weight->shape[1];
  const BufferSpec* x = step.buffer(inputs[0], k);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], n);
  step.check(x->rows == "logits" && y->rows == "logits", "its buffers must count rows of logits");
  step.apart(y, x, false);
  const WeightSpec* codes = step.find_weight(inputs[2]);
  const bool fits =
      codes->dtype == kCodes && codes->layout == panel_layout_of(kCodes, kCodesGroup) && codes->shape == weight->shape;
  step.check(fits, "weight " + codes->name + " must hold a row of " + std::string(kCodes) + " codes for each of " +
                       weight->name);
  const WeightSpec* table = step.row_weight(inputs[4], kTableFormat.dtype, {-1, k});
  step.check(table->shape[0] >= n, "the table has fewer rows than weight " + weight->name);
  const int64_t panels = num_panels_of(n, false), code_bytes = panel_bytes_of(kCodes, k, kCodesGroup);
  bound.pieces = step.panels(weight, panels, panel_bytes_of(weight->dtype, k, 0), false);
  const auto whole = bound.pieces.size();
  for (const WeightSlice& piece : step.panels(codes, panels, code_bytes, false)) {
    bound.pieces.push_back(piece);
    for (const std::byte* at = piece.data; at < piece.data + (piece.end - piece.begin) * code_bytes; at += code_bytes)
      bound.scales.insert(bound.scales.end(), reinterpret_cast<const float*>(at),
                          reinterpret_cast<const float*>(at) + kPanel);
  }
  const std::span<const WeightSlice> pieces(bound.pieces);
  bound.counts_logits = true;
  bound.args = ScreenedMatmulArgs{
      .x = step.at(x),
      .whole_rows = step.given(5, "whole_rows"),
      .product = bind_product(step, "product", weight, 0, step.at(y), pieces.first(whole)),
      .estimate = bind_product(step, "estimate", codes, kCodesGroup, step.at(y), pieces.subspan(whole)),
      .scales = bound.scales.data(),
      .dither = reinterpret_cast<const float*>(step.at(step.row_weight(inputs[3], "f32", {k}))),
      .table = step.at(table),
      .y = step.at(y),
      .rows = 0,
      .n = n,
      .k = k,
      .row_bytes = row_bytes_of(kTableFormat.dtype, k)};
}

}  // namespace
}  // namespace ingot

INGOT_OP("screened_matmul", ScreenedMatmulArgs, ingot::bind_screened_matmul, .takes_private_rows = true)
