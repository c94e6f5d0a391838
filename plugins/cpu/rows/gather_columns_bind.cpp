#include "execution/binder.h"
#include "rows/gather_columns_args.h"

namespace ingot {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 24;  // whose numbers float32 holds

void bind_gather_columns(const Binder& step, BoundStep& bound) {
  step.check_form(2, 1, 0);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* y = step.find_buffer(step.spec().outputs[0]);
  const float* order = step.vector(step.spec().inputs[1], y->cols);
  step.check(order != nullptr, "input order is missing");
  step.check(x->cols > 0 && x->cols <= kMostColumns, "its input must have at most 2^24 columns");
  step.same_rows(x, y);
  step.apart(y, x, false);
  bound.counts_logits = x->rows == "logits";
  bound.args =
      GatherColumnsArgs{.x = step.at(x), .order = order, .y = step.at(y), .rows = 0, .cols = x->cols, .count = y->cols};
}

}  // namespace
}  // namespace ingot

INGOT_OP("gather_columns", GatherColumnsArgs, ingot::bind_gather_columns, .shares_by_rows = true)
