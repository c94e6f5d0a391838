#include "execution/binder.h"
#include "rows/gather_rows_args.h"

namespace ingot {
namespace {

void bind_gather_rows(const Binder& step, BoundStep& bound) {
  step.check_form(2, 1, 0);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  step.counts_tokens(x);
  step.check(y->rows == "logits", "its output must count logit rows");
  step.apart(y, x, false);
  bound.counts_logits = true;
  bound.args = GatherRowsArgs{
      .x = step.at(x), .taken = step.given(1, "logit_rows"), .y = step.at(y), .rows = 0, .cols = x->cols};
}

}  // namespace
}  // namespace ingot

INGOT_OP("gather_rows", GatherRowsArgs, ingot::bind_gather_rows, .shares_by_rows = true)
