#include "execution/binder.h"
#include "moe/moe_route_args.h"

namespace ingot {
namespace {

void bind_moe_route(const Binder& step, BoundStep& bound) {
  step.check_form(2, 2, 9);
  const BufferSpec* logits = step.find_buffer(step.spec().inputs[0]);
  const int64_t groups = step.attr_int("groups", 1, logits->cols);
  const int64_t group_top = step.attr_int("group_top", 1, groups);
  const int64_t group_best = step.attr_int("group_best", 1, 2);
  step.check(groups == 1 || (logits->cols % groups == 0 && logits->cols >= group_best * groups),
             "the experts cannot be shared evenly among the groups");
  const int64_t slots = step.attr_int("per_token", 1, logits->cols / groups * group_top);
  const std::string score = step.attr_word("score");
  step.check(score == "softmax" || score == "sigmoid", "attribute score must be softmax or sigmoid");
  const float* bias = step.vector(step.spec().inputs[1], logits->cols);
  const BufferSpec* ids = step.buffer(step.spec().outputs[0], slots);
  const BufferSpec* weights = step.buffer(step.spec().outputs[1], slots);
  for (const BufferSpec* each : {ids, weights}) step.same_rows(logits, each);
  bound.counts_logits = logits->rows == "logits";
  step.apart(ids, logits, false);
  step.apart(weights, logits, false);
  step.apart(ids, weights, false);
  bound.args = MoeRouteArgs{.logits = step.at(logits),
                            .bias = bias,
                            .ids = step.at(ids),
                            .weights = step.at(weights),
                            .rows = 0,
                            .experts = logits->cols,
                            .slots = slots,
                            .normalized = step.attr_int("normalized", 0, 1) == 1,
                            .sigmoid = score == "sigmoid",
                            .eps = step.attr_not_negative("eps"),
                            .floor = step.attr_not_negative("floor"),
                            .scale = step.attr_float("scale"),
                            .groups = groups,
                            .group_top = group_top,
                            .group_best = group_best};
}

}  // namespace
}  // namespace ingot

INGOT_OP("moe_route", MoeRouteArgs, ingot::bind_moe_route)
