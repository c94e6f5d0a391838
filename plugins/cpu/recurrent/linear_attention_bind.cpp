#include "execution/binder.h"
#include "recurrent/linear_attention_args.h"

namespace ingot {
namespace {

void bind_linear_attention(const Binder& step, BoundStep& bound) {
  step.check_form(8, 1, 11);
  const int64_t heads = step.attr_int("heads", 1, 4096), key_heads = step.attr_int("key_heads", 1, 4096);
  const int64_t key_dim = step.attr_int("key_dim", 1, 1024), value_dim = step.attr_int("value_dim", 1, 1024);
  step.check_multiple("attribute heads", heads, "attribute key_heads", key_heads);
  StateSlots kv = step.layer_state(heads * key_dim * value_dim);
  kv.query_starts = step.given(5, "query_starts");
  kv.past_lengths = step.given(6, "past_lengths");
  kv.block_tables = step.given(7, "block_tables");
  const std::vector<std::string>& inputs = step.spec().inputs;
  const BufferSpec* x = step.buffer(inputs[0], 2 * key_heads * key_dim + heads * value_dim);
  const bool by_dim = step.attr_int("by_dim", 0, 1) == 1;
  const BufferSpec* dt = step.buffer(inputs[1], by_dim ? heads * key_dim : heads);
  const BufferSpec* beta = step.optional_buffer(inputs[2], heads);
  step.check(beta != nullptr || !by_dim, "input beta is missing, which decays by dimension (by_dim) need");
  const BufferSpec* y = step.buffer(step.spec().outputs[0], heads * value_dim);
  for (const BufferSpec* each : {x, dt, beta, y}) step.counts_tokens(each);
  for (const BufferSpec* each : {x, dt, beta}) step.apart(y, each, false);
  const float* a_log = step.vector(inputs[3], heads);
  step.check(a_log != nullptr, "input a_log is missing");
  bound.args = LinearAttentionArgs{.x = step.at(x),
                                   .dt = step.at(dt),
                                   .beta = step.at(beta),
                                   .a_log = a_log,
                                   .skip = step.vector(inputs[4], heads),
                                   .y = step.at(y),
                                   .kv = kv,
                                   .heads = heads,
                                   .key_heads = key_heads,
                                   .key_dim = key_dim,
                                   .value_dim = value_dim,
                                   .scale = step.attr_float("scale"),
                                   .l2_eps = step.attr_not_negative("l2_eps"),
                                   .dt_min = step.attr_not_negative("dt_min"),
                                   .dt_max = step.attr_not_negative("dt_max"),
                                   .values_first = step.attr_int("values_first", 0, 1) == 1,
                                   .by_dim = by_dim};
}

}  // namespace
}  // namespace ingot

INGOT_OP("linear_attention", LinearAttentionArgs, ingot::bind_linear_attention)
