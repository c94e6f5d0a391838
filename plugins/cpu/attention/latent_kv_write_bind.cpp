#include "attention/latent_kv_write_args.h"
#include "execution/binder.h"

namespace ingot {
namespace {

void bind_latent_kv_write(const Binder& step, BoundStep& bound) {
  step.check_form(7, 1, 9);
  PagedKv kv = step.layer_kv(true);
  step.attr_int("rank", kv.value_dim, kv.value_dim);
  kv.positions = step.given(4, "positions");
  kv.sequence_of = step.given(5, "token_sequences");
  kv.block_tables = step.given(6, "block_tables");
  const int64_t heads = step.attr_int("heads", 1, 4096), rotary_dim = kv.head_dim - kv.value_dim;
  step.check(rotary_dim >= 1, "rank must be less than head_dim");
  const BufferSpec* q = step.find_buffer(step.spec().inputs[0]);
  step.check(q->cols % heads == 0 && q->cols / heads >= rotary_dim,
             "queries must have at least " + std::to_string(rotary_dim) + " columns for each head");
  const BufferSpec* latent = step.buffer(step.spec().inputs[1], kv.head_dim);
  const std::string& table = step.spec().inputs[2];
  const BufferSpec* cos_sin = table.empty() ? nullptr : step.find_buffer(table);
  step.check(cos_sin == nullptr || (cos_sin->cols >= 2 && cos_sin->cols % 2 == 0 && cos_sin->cols <= rotary_dim),
             "rotary dimensions must be even and fit into what is rotated");
  const BufferSpec* y = step.buffer(step.spec().outputs[0], q->cols);
  for (const BufferSpec* each : {q, latent, cos_sin, y}) step.counts_tokens(each);
  step.apart(y, q, true);
  for (const BufferSpec* input : {latent, cos_sin}) step.apart(y, input, false);
  bound.args = LatentKvWriteArgs{.q = step.at(q),
                                 .latent = step.at(latent),
                                 .cos_sin = step.at(cos_sin),
                                 .norm = step.vector(step.spec().inputs[3], kv.value_dim),
                                 .y = step.at(y),
                                 .kv = kv,
                                 .heads = heads,
                                 .q_dim = q->cols / heads,
                                 .half = cos_sin == nullptr ? 0 : cos_sin->cols / 2,
                                 .interleaved = step.attr_int("interleaved", 0, 1) == 1,
                                 .norm_eps = step.attr_not_negative("norm_eps"),
                                 .growth = step.attr_not_negative("growth"),
                                 .growth_every = step.attr_int("growth_every", 1, (int64_t{1} << 31) - 1)};
}

}  // namespace
}  // namespace ingot

INGOT_OP("latent_kv_write", LatentKvWriteArgs, ingot::bind_latent_kv_write)
