#include "execution/binder.h"
#include "rows/add_gated_args.h"

namespace ingot {
namespace {

void bind_add_gated(const Binder& step, BoundStep& bound) {
  step.check_form(3, 1, 0);
  const BufferSpec* a = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* b = step.buffer(step.spec().inputs[1], a->cols);
  const BufferSpec* gate = step.buffer(step.spec().inputs[2], 1);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], a->cols);
  for (const BufferSpec* each : {b, gate, y}) step.same_rows(a, each);
  step.apart(y, a, true);
  step.apart(y, b, false);
  step.apart(y, gate, false);
  bound.counts_logits = a->rows == "logits";
  bound.args = AddGatedArgs{
      .a = step.at(a), .b = step.at(b), .gate = step.at(gate), .y = step.at(y), .rows = 0, .cols = a->cols};
}

}  // namespace
}  // namespace ingot

INGOT_OP("add_gated", AddGatedArgs, ingot::bind_add_gated, .shares_by_rows = true)
