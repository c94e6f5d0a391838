#include "execution/binder.h"
#include "ranks/all_gather_args.h"

namespace ingot {
namespace {

void bind_all_gather(const Binder& step, BoundStep& bound) {
  step.check_form(1, 1, 2);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t columns = step.attr_int("columns", 1, kMaxCount);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], columns);
  step.same_rows(x, y);
  step.apart(y, x, false);
  bound.counts_logits = x->rows == "logits";
  const int ranks = step.group()->places();
  const AllGatherArgs args{.group = step.group(),
                           .meeting = step.meeting(x, (columns + ranks - 1) / ranks),
                           .x = step.to_be_copied(x),
                           .y = step.at(y),
                           .rows = 0,
                           .columns = columns};
  const int rank = args.group->place();
  const int64_t own = args.first(rank + 1) - args.first(rank);
  step.check(x->cols == own, "rank " + std::to_string(rank) + " must have " + std::to_string(own) + " of " +
                                 std::to_string(columns) + " columns, has " + std::to_string(x->cols));
  bound.args = args;
}

}  // namespace
}  // namespace ingot

INGOT_OP("all_gather", AllGatherArgs, ingot::bind_all_gather, .meets_ranks = true)
