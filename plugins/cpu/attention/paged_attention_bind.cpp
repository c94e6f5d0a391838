#include "attention/paged_attention_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_paged_attention(const Binder& step, BoundStep& bound) {
  step.check_form(6, 1, 10);
  PagedKv kv = step.layer_kv();
  kv.query_starts = step.given(3, "query_starts");
  kv.past_lengths = step.given(4, "past_lengths");
  kv.block_tables = step.given(5, "block_tables");
  const int64_t heads = step.attr_int("heads", 1, 4096);
  step.check_multiple("attribute heads", heads, "the KV heads of the cache", kv.kv_heads);
  const BufferSpec* q = step.buffer(step.spec().inputs[0], heads * kv.head_dim);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], heads * kv.head_dim);
  step.counts_tokens(q);
  step.counts_tokens(y);
  step.apart(y, q, false);
  const int64_t window = step.attr_int("window", 0, kMaxCount);
  const int64_t kept = step.cache(kv).window;
  step.check(kept == 0 || (window > 0 && window <= kept),
             "the window must be within that of the cache group, " + std::to_string(kept));
  bound.args = PagedAttentionArgs{.q = step.at(q),
                                  .y = step.at(y),
                                  .kv = kv,
                                  .sinks = step.vector(step.spec().inputs[1], heads),
                                  .slopes = step.vector(step.spec().inputs[2], heads),
                                  .bf16_bias = step.attr_int("bf16_bias", 0, 1) != 0,
                                  .growth = step.attr_not_negative("growth"),
                                  .growth_every = step.attr_int("growth_every", 1, kMaxCount),
                                  .heads = heads,
                                  .window = window == 0 ? kMaxCount : window,
                                  .scale = step.attr_float("scale"),
                                  .softcap = step.attr_not_negative("softcap")};
}

}  // namespace
}  // namespace ingot

INGOT_OP("paged_attention", PagedAttentionArgs, ingot::bind_paged_attention)
