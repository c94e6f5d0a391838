#include "execution/binder.h"
#include "streams/match_magnitude_args.h"

namespace ingot {
namespace {

void bind_match_magnitude(const Binder& step, BoundStep& bound) {
  step.check_form(2, 1, 3);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t streams = step.attr_int("streams", 1, 16);
  step.check_multiple("the number of columns", x->cols, "attribute streams", streams);
  const int64_t width = x->cols / streams;
  const bool joins = step.attr_int("joins", 0, 1) == 1;
  const BufferSpec* like = step.buffer(step.spec().inputs[1], width);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], x->cols + (joins ? width : 0));
  for (const BufferSpec* other : {like, y}) step.same_rows(x, other);
  for (const BufferSpec* input : {x, like}) step.apart(y, input, false);
  bound.counts_logits = x->rows == "logits";
  bound.args = MatchMagnitudeArgs{.x = step.at(x),
                                  .like = step.at(like),
                                  .y = step.at(y),
                                  .rows = 0,
                                  .streams = streams,
                                  .width = width,
                                  .least = step.attr_not_negative("least"),
                                  .joins = joins};
}

}  // namespace
}  // namespace ingot

INGOT_OP("match_magnitude", MatchMagnitudeArgs, ingot::bind_match_magnitude, .shares_by_rows = true)
