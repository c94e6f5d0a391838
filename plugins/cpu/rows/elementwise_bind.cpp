#include "execution/binder.h"
#include "rows/elementwise_args.h"

namespace ingot {
namespace {

void bind_elementwise(const Binder& step, BoundStep& bound) {
  const bool is_cap = step.spec().op == "softcap";
  step.check_form(is_cap ? 1 : 2, 1, 1);
  const BufferSpec* a = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* b = is_cap ? nullptr : step.optional_buffer(step.spec().inputs[1], a->cols);
  const float cap = is_cap ? step.attr_float("cap") : 0.0f;
  step.check(!is_cap || cap > 0, "attribute cap must be above 0");
  const BufferSpec* y = step.buffer(step.spec().outputs[0], a->cols);
  step.same_rows(a, b);
  step.same_rows(a, y);
  step.apart(y, a, true);
  step.apart(y, b, true);
  bound.counts_logits = a->rows == "logits";
  bound.args = ElementwiseArgs{.a = step.at(a),
                               .b = step.at(b),
                               .y = step.at(y),
                               .rows = 0,
                               .cols = a->cols,
                               .activation = is_cap ? Activation::kNone : step.attr_activation(),
                               .cap = cap};
}

}  // namespace
}  // namespace ingot

INGOT_OP("activation", ElementwiseArgs, ingot::bind_elementwise, .shares_by_rows = true)
INGOT_OP("softcap", ElementwiseArgs, ingot::bind_elementwise, .shares_by_rows = true)
