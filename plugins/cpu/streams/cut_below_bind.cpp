#include "execution/binder.h"
#include "streams/cut_below_args.h"

namespace ingot {
namespace {

void bind_cut_below(const Binder& step, BoundStep& bound) {
  step.check_form(1, 1, 1);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  step.same_rows(x, y);
  step.apart(y, x, true);
  bound.counts_logits = x->rows == "logits";
  bound.args = CutBelowArgs{
      .x = step.at(x), .y = step.at(y), .rows = 0, .cols = x->cols, .deviations = step.attr_float("deviations")};
}

}  // namespace
}  // namespace ingot

INGOT_OP("cut_below", CutBelowArgs, ingot::bind_cut_below, .shares_by_rows = true)
