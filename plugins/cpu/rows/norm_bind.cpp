#include "execution/binder.h"
#include "rows/norm_args.h"

namespace ingot {
namespace {

void bind_norm(const Binder& step, BoundStep& bound) {
  const bool has_bias = step.spec().op == "layer_norm";
  step.check_form(has_bias ? 4 : 3, 2, 1);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* residual = step.optional_buffer(step.spec().inputs[has_bias ? 3 : 2], x->cols);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  const BufferSpec* sum = step.optional_buffer(step.spec().outputs[1], x->cols);
  for (const BufferSpec* other : {residual, y, sum}) step.same_rows(x, other);
  for (const BufferSpec* input : {x, residual}) {
    step.apart(y, input, true);
    step.apart(sum, input, true);
  }
  step.apart(y, sum, false);
  const float* weight = step.vector(step.spec().inputs[1], x->cols);
  step.check(weight != nullptr, "input weight is missing");
  bound.counts_logits = x->rows == "logits";
  bound.args = NormArgs{.x = step.at(x),
                        .weight = weight,
                        .bias = has_bias ? step.vector(step.spec().inputs[2], x->cols) : nullptr,
                        .residual = step.at(residual),
                        .y = step.at(y),
                        .sum = step.at(sum),
                        .rows = 0,
                        .hidden = x->cols,
                        .eps = step.attr_not_negative("eps")};
}

}  // namespace
}  // namespace ingot

INGOT_OP("rms_norm", NormArgs, ingot::bind_norm, .shares_by_rows = true)
INGOT_OP("layer_norm", NormArgs, ingot::bind_norm, .shares_by_rows = true)
