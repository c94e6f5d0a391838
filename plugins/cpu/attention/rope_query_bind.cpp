#include "attention/rope_query_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_rope_query(const Binder& step, BoundStep& bound) {
  step.check_form(3, 1, 4);
  const int64_t heads = step.attr_int("heads", 1, 4096), dim = step.attr_int("head_dim", 1, 512);
  const BufferSpec* x = step.buffer(step.spec().inputs[0], heads * dim);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], heads * dim);
  const BufferSpec* cos_sin = step.spec().inputs[1].empty() ? nullptr : step.find_buffer(step.spec().inputs[1]);
  step.check(cos_sin == nullptr || (cos_sin->cols % 2 == 0 && cos_sin->cols <= dim),
             "cos_sin must have an even number of columns up to head_dim");
  for (const BufferSpec* each : {x, y, cos_sin}) step.counts_tokens(each);
  step.apart(y, x, false);
  step.apart(y, cos_sin, false);
  const std::string& norm = step.spec().inputs[2];
  const int64_t run = norm.empty() ? dim : step.find_weight(norm)->shape[0];
  step.check(run == dim || run == heads * dim, "weight " + norm + " has " + std::to_string(run) +
                                                   " elements, expected " + std::to_string(dim) + " (one head) or " +
                                                   std::to_string(heads * dim) + " (all heads)");
  bound.args = RopeQueryArgs{.x = step.at(x),
                             .cos_sin = step.at(cos_sin),
                             .y = step.at(y),
                             .q_norm = step.vector(norm, run),
                             .rows = 0,
                             .heads = heads,
                             .head_dim = dim,
                             .half = cos_sin == nullptr ? 0 : cos_sin->cols / 2,
                             .q_run = run,
                             .norm_eps = step.attr_not_negative("norm_eps"),
                             .interleaved = step.attr_int("interleaved", 0, 1) == 1};
}

}  // namespace
}  // namespace ingot

INGOT_OP("rope_query", RopeQueryArgs, ingot::bind_rope_query, .shares_by_rows = true)
