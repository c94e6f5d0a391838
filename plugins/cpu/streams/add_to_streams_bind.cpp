#include "execution/binder.h"
#include "streams/add_to_streams_args.h"

namespace ingot {
namespace {

void bind_add_to_streams(const Binder& step, BoundStep& bound) {
  step.check_form(3, 1, 2);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t streams = step.attr_int("streams", 1, 16), active = step.attr_int("active", 0, streams - 1);
  step.check_multiple("the number of columns", x->cols, "attribute streams", streams);
  const int64_t width = x->cols / streams;
  const BufferSpec* made = step.buffer(step.spec().inputs[1], width);
  const BufferSpec* coefs = step.optional_buffer(step.spec().inputs[2], streams);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols);
  for (const BufferSpec* other : {made, y}) step.same_rows(x, other);
  for (const BufferSpec* input : {x, made}) step.apart(y, input, false);
  if (coefs != nullptr) {
    step.same_rows(x, coefs);
    step.apart(y, coefs, false);
  }
  bound.counts_logits = x->rows == "logits";
  bound.args = AddToStreamsArgs{.x = step.at(x),
                                .made = step.at(made),
                                .coefs = coefs == nullptr ? nullptr : step.at(coefs),
                                .y = step.at(y),
                                .rows = 0,
                                .streams = streams,
                                .width = width,
                                .active = active};
}

}  // namespace
}  // namespace ingot

INGOT_OP("add_to_streams", AddToStreamsArgs, ingot::bind_add_to_streams, .shares_by_rows = true)
