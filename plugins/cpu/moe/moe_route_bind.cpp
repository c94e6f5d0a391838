#include "execution/binder.h"
#include "moe/moe_route_args.h"

namespace ingot {
namespace {

void bind_moe_route(const Binder& step, BoundStep& bound) {
  step.check_form(1, 2, 2);
  const BufferSpec* logits = step.find_buffer(step.spec().inputs[0]);
  const int64_t slots = step.attr_int("per_token", 1, logits->cols);
  const BufferSpec* ids = step.buffer(step.spec().outputs[0], slots);
  const BufferSpec* weights = step.buffer(step.spec().outputs[1], slots);
  for (const BufferSpec* each : {ids, weights}) step.same_rows(logits, each);
  bound.counts_logits = logits->rows == "logits";
  step.apart(ids, logits, false);
  step.apart(weights, logits, false);
  step.apart(ids, weights, false);
  bound.args = MoeRouteArgs{.logits = step.at(logits),
                            .ids = step.at(ids),
                            .weights = step.at(weights),
                            .rows = 0,
                            .experts = logits->cols,
                            .slots = slots,
                            .normalized = step.attr_int("normalized", 0, 1) == 1};
}

}  // namespace
}  // namespace ingot

INGOT_OP("moe_route", ingot::bind_moe_route)
