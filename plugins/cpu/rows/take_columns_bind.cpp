#include "execution/binder.h"
#include "rows/take_columns_args.h"

namespace ingot {
namespace {

void bind_take_columns(const Binder& step, BoundStep& bound) {
  step.check_form(1, 1, 3);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t of = step.attr_int("of", 1, kMaxCount), first = step.attr_int("first", 0, kMaxCount),
                count = step.attr_int("count", 1, kMaxCount);
  step.check_multiple("the number of columns", x->cols, "attribute of", of);
  step.check(first + count <= of, "attributes first and count end at column " + std::to_string(first + count) +
                                      " of a group of " + std::to_string(of));
  const int64_t groups = x->cols / of;
  const BufferSpec* y = step.buffer(step.spec().outputs[0], product(groups, count));
  step.same_rows(x, y);
  step.apart(y, x, false);
  bound.counts_logits = x->rows == "logits";
  bound.args = TakeColumnsArgs{
      .x = step.at(x), .y = step.at(y), .rows = 0, .groups = groups, .of = of, .first = first, .count = count};
}

}  // namespace
}  // namespace ingot

INGOT_OP("take_columns", TakeColumnsArgs, ingot::bind_take_columns, .shares_by_rows = true)
