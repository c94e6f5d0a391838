#include "execution/binder.h"
#include "streams/mix_streams_args.h"

namespace ingot {
namespace {

void bind_mix_streams(const Binder& step, BoundStep& bound) {
  step.check_form(2, 1, 1);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t streams = step.attr_int("streams", 1, 16);
  step.check_multiple("the number of columns", x->cols, "attribute streams", streams);
  const BufferSpec* coefs = step.buffer(step.spec().inputs[1], streams * streams);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  for (const BufferSpec* other : {coefs, y}) step.same_rows(x, other);
  for (const BufferSpec* input : {x, coefs}) step.apart(y, input, false);
  bound.counts_logits = x->rows == "logits";
  bound.args = MixStreamsArgs{.x = step.at(x),
                              .coefs = step.at(coefs),
                              .y = step.at(y),
                              .rows = 0,
                              .streams = streams,
                              .width = x->cols / streams};
}

}  // namespace
}  // namespace ingot

INGOT_OP("mix_streams", MixStreamsArgs, ingot::bind_mix_streams, .shares_by_rows = true)
