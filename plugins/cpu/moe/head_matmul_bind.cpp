#include "execution/binder.h"
#include "moe/head_matmul_args.h"

namespace ingot {
namespace {

void bind_head_matmul(const Binder& step, BoundStep& bound) {
  step.check_form(3, 1, 4);
  step.check_absent(2, "tail");
  const WeightSpec* weight = step.product_weight(step.spec().inputs[1], 3, false);
  const int64_t heads = weight->shape[0], n = weight->shape[1], k = weight->shape[2];
  step.check(step.attr_group(weight->dtype) == 0, "weights of heads do not come in groups");
  step.attr_int("heads", heads, heads);
  const int64_t kept = step.attr_int("kept", 0, 1024), num_panels = num_panels_of(n, false);
  const BufferSpec* x = step.buffer(step.spec().inputs[0], product(heads, k + kept));
  const BufferSpec* y = step.buffer(step.spec().outputs[0], product(heads, n + kept));
  step.same_rows(x, y);
  step.apart(y, x, false);
  bound.counts_logits = x->rows == "logits";
  bound.pieces = step.panels(weight, num_panels, product(heads, panel_bytes_of(weight->dtype, k, 0)), false);
  bound.args = HeadMatmulArgs{.x = step.at(x),
                              .y = step.at(y),
                              .pieces = bound.pieces.data(),
                              .num_panels = num_panels,
                              .rows = 0,
                              .heads = heads,
                              .n = n,
                              .k = k,
                              .kept = kept};
}

}  // namespace
}  // namespace ingot

INGOT_OP("head_matmul", HeadMatmulArgs, ingot::bind_head_matmul)
