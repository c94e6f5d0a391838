#include "execution/binder.h"
#include "recurrent/causal_conv_args.h"

namespace ingot {
namespace {

void bind_causal_conv(const Binder& step, BoundStep& bound) {
  step.check_form(6, 1, 4);
  const int64_t channels = step.attr_int("channels", 1, kMaxCount - 1), width = step.attr_int("width", 2, 64);
  StateSlots kv = step.layer_state((width - 1) * channels);
  kv.query_starts = step.given(3, "query_starts");
  kv.past_lengths = step.given(4, "past_lengths");
  kv.block_tables = step.given(5, "block_tables");
  const BufferSpec* x = step.buffer(step.spec().inputs[0], channels);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], channels);
  for (const BufferSpec* each : {x, y}) step.counts_tokens(each);
  step.apart(y, x, false);
  const float* weight = step.vector(step.spec().inputs[1], width * channels);
  step.check(weight != nullptr, "input weight is missing");
  const Activation activation = step.attr_activation();
  step.check(activation == Activation::kNone || activation == Activation::kSilu,
             "attribute activation must be none or silu");
  bound.args = CausalConvArgs{.x = step.at(x),
                              .weight = weight,
                              .bias = step.vector(step.spec().inputs[2], channels),
                              .y = step.at(y),
                              .kv = kv,
                              .channels = channels,
                              .width = width,
                              .silu = activation == Activation::kSilu};
}

}  // namespace
}  // namespace ingot

INGOT_OP("causal_conv", CausalConvArgs, ingot::bind_causal_conv)
