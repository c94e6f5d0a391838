#include "execution/binder.h"
#include "matmul/matmul_args.h"

namespace ingot {
namespace {

void bind_matmul(const Binder& step, BoundStep& bound) {
  step.bind_form(bound, 4, 4, step.kernel());
  const bool gated = step.attr_int("gated", 0, 1) == 1;
  const WeightSpec* weight = step.product_weight(step.spec().inputs[1], 2, gated);
  const int64_t n = weight->shape[0], k = weight->shape[1], group = step.attr_group(weight->dtype);
  const int64_t out = gated ? n / 2 : n;
  const int64_t num_panels = num_panels_of(n, gated);
  const BufferSpec* x = step.buffer(step.spec().inputs[0], k);
  const BufferSpec* residual = step.optional_buffer(step.spec().inputs[3], out);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], out);
  step.same_rows(x, y);
  step.same_rows(x, residual);
  step.apart(y, x, false);
  step.apart(y, residual, true);
  bound.pieces = step.panels(weight, num_panels, panel_bytes_of(weight->dtype, k, group), gated);
  bound.counts_logits = x->rows == "logits";
  bound.args = MatmulArgs{.x = step.at(x),
                          .pieces = bound.pieces.data(),
                          .num_pieces = static_cast<int64_t>(bound.pieces.size()),
                          .num_panels = num_panels,
                          .bias = step.vector(step.spec().inputs[2], n),
                          .residual = step.at(residual),
                          .y = step.at(y),
                          .rows = 0,
                          .n = n,
                          .k = k,
                          .activation = step.attr_activation(),
                          .gated = gated,
                          .group = group};
}

int32_t matmul_tactics(const Kernel& kernel) { return kernel.isa().starts_with("amx") ? kTileTactics : kMatmulTactics; }

}  // namespace
}  // namespace ingot

INGOT_OP("matmul", MatmulArgs, ingot::bind_matmul, .takes_private_rows = true, .norms_rows = true,
         .tactics = ingot::matmul_tactics)
