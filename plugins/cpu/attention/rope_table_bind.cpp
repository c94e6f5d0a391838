#include "attention/rope_table_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_rope_table(const Binder& step, BoundStep& bound) {
  step.check_form(2, 1, 1);
  const BufferSpec* y = step.find_buffer(step.spec().outputs[0]);
  step.counts_tokens(y);
  step.check(y->cols % 2 == 0, "its output must have an even number of columns");
  const float* inv_freq = step.vector(step.spec().inputs[0], y->cols / 2);
  step.check(inv_freq != nullptr, "input inv_freq is missing");
  bound.args = RopeTableArgs{.inv_freq = inv_freq,
                             .positions = step.given(1, "positions"),
                             .y = step.at(y),
                             .rows = 0,
                             .half = y->cols / 2,
                             .scale = step.attr_float("scale")};
}

}  // namespace
}  // namespace ingot

INGOT_OP("rope_table", RopeTableArgs, ingot::bind_rope_table, .shares_by_rows = true)
