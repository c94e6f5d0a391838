#include "execution/binder.h"
#include "recurrent/gated_norm_args.h"

namespace ingot {
namespace {

void bind_gated_norm(const Binder& step, BoundStep& bound) {
  step.check_form(3, 1, 4);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const BufferSpec* gate = step.buffer(step.spec().inputs[1], x->cols);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  for (const BufferSpec* other : {gate, y}) step.same_rows(x, other);
  for (const BufferSpec* input : {x, gate}) step.apart(y, input, true);
  const int64_t group = step.attr_int("columns", 1, x->cols);
  step.check_multiple("the number of columns", x->cols, "attribute columns", group);
  const int64_t weights = step.find_weight(step.spec().inputs[2])->shape[0];
  step.check(weights == group || weights == x->cols,
             "the weight has " + std::to_string(weights) + " elements, expected " + std::to_string(group) +
                 " (one group of columns) or " + std::to_string(x->cols) + " (all columns)");
  const std::string activation = step.attr_word("activation");
  step.check(activation == "silu" || activation == "sigmoid", "attribute activation must be silu or sigmoid");
  bound.counts_logits = x->rows == "logits";
  bound.args = GatedNormArgs{.x = step.at(x),
                             .gate = step.at(gate),
                             .weight = step.vector(step.spec().inputs[2], weights),
                             .y = step.at(y),
                             .rows = 0,
                             .cols = x->cols,
                             .group = group,
                             .weights = weights,
                             .eps = step.attr_not_negative("eps"),
                             .norm_first = step.attr_int("norm_first", 0, 1) == 1,
                             .sigmoid = activation == "sigmoid"};
}

}  // namespace
}  // namespace ingot

INGOT_OP("gated_norm", GatedNormArgs, ingot::bind_gated_norm, .shares_by_rows = true)
