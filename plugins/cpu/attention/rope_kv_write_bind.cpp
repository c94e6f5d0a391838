#include "attention/rope_kv_write_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_rope_kv_write(const Binder& step, BoundStep& bound) {
  step.check_form(7, 1, 8);
  PagedKv kv = step.layer_kv();
  kv.positions = step.given(4, "positions");
  kv.sequence_of = step.given(5, "token_sequences");
  kv.block_tables = step.given(6, "block_tables");
  const int64_t heads = step.attr_int("heads", 1, 4096);
  const bool keys_as_values = step.attr_int("keys_as_values", 0, 1) == 1;
  const int64_t parts = heads + (keys_as_values ? 1 : 2) * kv.kv_heads;
  const BufferSpec* qkv = step.buffer(step.spec().inputs[0], parts * kv.head_dim);
  const BufferSpec* q = step.buffer(step.spec().outputs[0], heads * kv.head_dim);
  const BufferSpec* cos_sin = step.spec().inputs[1].empty() ? nullptr : step.find_buffer(step.spec().inputs[1]);
  step.check(cos_sin == nullptr || (cos_sin->cols % 2 == 0 && cos_sin->cols <= kv.head_dim),
             "cos_sin must have an even number of columns up to head_dim");
  for (const BufferSpec* each : {qkv, q, cos_sin}) step.counts_tokens(each);
  step.apart(q, qkv, false);
  step.apart(q, cos_sin, false);
  // the norm's weight is as long as a head or as all heads
  const auto run = [&](const std::string& name, int64_t count) {
    const int64_t n = name.empty() ? kv.head_dim : step.find_weight(name)->shape[0];
    step.check(n == kv.head_dim || n == count * kv.head_dim,
               "weight " + name + " has " + std::to_string(n) + " elements, expected " + std::to_string(kv.head_dim) +
                   " (one head) or " + std::to_string(count * kv.head_dim) + " (all heads)");
    return n;
  };
  const int64_t q_run = run(step.spec().inputs[2], heads), k_run = run(step.spec().inputs[3], kv.kv_heads);
  bound.args = RopeKvWriteArgs{.qkv = step.at(qkv),
                               .cos_sin = step.at(cos_sin),
                               .q = step.at(q),
                               .q_norm = step.vector(step.spec().inputs[2], q_run),
                               .k_norm = step.vector(step.spec().inputs[3], k_run),
                               .kv = kv,
                               .heads = heads,
                               .half = cos_sin == nullptr ? 0 : cos_sin->cols / 2,
                               .q_run = q_run,
                               .k_run = k_run,
                               .norm_eps = step.attr_not_negative("norm_eps"),
                               .interleaved = step.attr_int("interleaved", 0, 1) == 1,
                               .value_norm = step.attr_int("value_norm", 0, 1) == 1,
                               .keys_as_values = keys_as_values};
}

}  // namespace
}  // namespace ingot

INGOT_OP("rope_kv_write", RopeKvWriteArgs, ingot::bind_rope_kv_write)
