#include "execution/binder.h"
#include "ranks/all_reduce_args.h"

namespace ingot {
namespace {

void bind_all_reduce(const Binder& step, BoundStep& bound) {
  step.check_form(1, 1, 1);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  step.same_rows(x, y);
  step.apart(y, x, false);
  bound.counts_logits = x->rows == "logits";
  bound.args = AllReduceArgs{.group = step.group(),
                             .meeting = step.meeting(x, x->cols),
                             .x = step.to_be_copied(x),
                             .y = step.at(y),
                             .rows = 0,
                             .cols = x->cols,
                             .common = step.in_slot(y)};
}

}  // namespace
}  // namespace ingot

INGOT_OP("all_reduce", AllReduceArgs, ingot::bind_all_reduce, .meets_ranks = true, .leaves_sums = true)
