#include "attention/latent_attention_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_latent_attention(const Binder& step, BoundStep& bound) {
  step.check_form(4, 1, 6);
  PagedKv kv = step.layer_kv(true);
  step.attr_int("rank", kv.value_dim, kv.value_dim);
  kv.query_starts = step.given(1, "query_starts");
  kv.past_lengths = step.given(2, "past_lengths");
  kv.block_tables = step.given(3, "block_tables");
  const int64_t heads = step.attr_int("heads", 1, 4096);
  const BufferSpec* q = step.buffer(step.spec().inputs[0], heads * kv.head_dim);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], heads * kv.value_dim);
  step.counts_tokens(q);
  step.counts_tokens(y);
  step.apart(y, q, false);
  bound.args = LatentAttentionArgs{{.q = step.at(q),
                                    .y = step.at(y),
                                    .kv = kv,
                                    .sinks = nullptr,
                                    .slopes = nullptr,
                                    .bf16_bias = false,
                                    .growth = 0.0f,
                                    .growth_every = 1,
                                    .heads = heads,
                                    .window = kMaxCount,
                                    .scale = step.attr_float("scale"),
                                    .softcap = 0.0f}};
}

}  // namespace
}  // namespace ingot

INGOT_OP("latent_attention", LatentAttentionArgs, ingot::bind_latent_attention)
