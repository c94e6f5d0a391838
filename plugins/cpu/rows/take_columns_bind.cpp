#include "execution/binder.h"
#include "rows/take_columns_args.h"

namespace ingot {
namespace {

void bind_take_columns(const Binder& step, BoundStep& bound) {
  step.check_form(1, 1, 3);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t of = step.attr_int("of", 1, kMaxCount), first = step.attr_int("first", 0, kMaxCount),
                count = step.attr_int("count", 1, kMaxCount);
  step.check(x->cols % of == 0, "attribute of must divide the columns of its input");
  step.check(first + count <= of, "attributes first and count reach beyond the columns of a group");
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

INGOT_OP("take_columns", ingot::bind_take_columns, .shares_by_rows = true)
