#include "execution/binder.h"
#include "rows/join_columns_args.h"

namespace ingot {
namespace {

void bind_join_columns(const Binder& step, BoundStep& bound) {
  step.check_form(JoinColumnsArgs::kMost, 1, 0);
  const BufferSpec* y = step.find_buffer(step.spec().outputs[0]);
  JoinColumnsArgs args{.parts = {}, .cols = {}, .y = step.at(y), .rows = 0};
  int64_t cols = 0;
  for (int i = 0; i < JoinColumnsArgs::kMost; ++i) {
    const std::string& name = step.spec().inputs[static_cast<size_t>(i)];
    if (name.empty()) {
      step.check(i > 1, "an input is missing");
      continue;
    }
    const BufferSpec* part = step.find_buffer(name);
    step.same_rows(part, y);
    step.apart(y, part, false);
    args.parts[i] = step.at(part);
    args.cols[i] = part->cols;
    cols += part->cols;
  }
  step.check(cols == y->cols, "its output must have the columns of all inputs");
  bound.counts_logits = y->rows == "logits";
  bound.args = args;
}

}  // namespace
}  // namespace ingot

INGOT_OP("join_columns", JoinColumnsArgs, ingot::bind_join_columns, .shares_by_rows = true)
