#include "execution/binder.h"
#include "moe/moe_matmul_args.h"

namespace ingot {
namespace {

void bind_moe_matmul(const Binder& step, BoundStep& bound) {
  const bool first = step.spec().op == "moe_gate_up";  // of the two halves
  step.bind_form(bound, first ? 5 : 6, first ? 6 : 2, step.kernel());
  step.check_absent(first ? 4 : 5, "lists");
  const bool gated = first && step.attr_int("gated", 0, 1) == 1;
  const size_t of_weight = first ? 2 : 3;
  const WeightSpec* weight = step.product_weight(step.spec().inputs[of_weight], 3, gated);
  const int64_t group = step.attr_group(weight->dtype);
  const int64_t experts = weight->shape[0], n = weight->shape[1], k = weight->shape[2];
  const BufferSpec* ids = step.find_buffer(step.spec().inputs[1]);
  const int64_t slots = ids->cols;
  step.check(
      slots <= experts && product(buffer_rows(step.plan(), *ids), slots) < kMaxCount,
      "each row takes " + std::to_string(slots) + " of " + std::to_string(experts) + " experts, which is too many");
  step.check(experts < 65536, "the weight has " + std::to_string(experts) + " experts, expected at most 65535");
  const BufferSpec* x = step.buffer(step.spec().inputs[0], first ? k : product(slots, k));
  const BufferSpec* weights = first ? nullptr : step.buffer(step.spec().inputs[2], slots);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], first ? product(slots, gated ? n / 2 : n) : n);
  for (const BufferSpec* each : {x, weights, y}) step.same_rows(ids, each);
  bound.counts_logits = ids->rows == "logits";
  for (const BufferSpec* input : {x, ids, weights}) step.apart(y, input, false);
  const int64_t num_panels = num_panels_of(n, gated);
  bound.pieces = step.panels(weight, num_panels, product(experts, panel_bytes_of(weight->dtype, k, group)), gated);
  bound.args = MoeMatmulArgs{.x = step.at(x),
                             .ids = step.at(ids),
                             .weights = step.at(weights),
                             .bias = step.vector(step.spec().inputs[of_weight + 1], product(experts, n)),
                             .pieces = bound.pieces.data(),
                             .num_panels = num_panels,
                             .y = step.at(y),
                             .rows = 0,
                             .slots = slots,
                             .experts = experts,
                             .n = n,
                             .k = k,
                             .group = group,
                             .activation = first ? step.attr_activation() : Activation::kNone,
                             .gated = gated,
                             .limit = first ? step.attr_not_negative("limit") : 0.0f,
                             .alpha = first ? step.attr_not_negative("alpha") : 0.0f};
}

}  // namespace
}  // namespace ingot

INGOT_OP(
    "moe_gate_up", MoeMatmulArgs, ingot::bind_moe_matmul, .takes_private_rows = true,
    .tactics = [](const ingot::Kernel&) { return ingot::kGateUpTactics; })
INGOT_OP(
    "moe_down", MoeMatmulArgs, ingot::bind_moe_matmul, .takes_private_rows = true,
    .tactics = [](const ingot::Kernel&) { return ingot::kDownTactics; })
