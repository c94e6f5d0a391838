#include "execution/binder.h"
#include "ranks/send_args.h"

namespace ingot {
namespace {

void bind_send(const Binder& step, BoundStep& bound) {
  step.check_form(1, 0, 3);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  step.counts_tokens(x);
  const Message& message = step.message();
  bound.args = SendArgs{.group = step.stages(), .message = message, .x = step.at(x), .rows = 0, .cols = x->cols};
}

}  // namespace
}  // namespace ingot

INGOT_OP("send", SendArgs, ingot::bind_send, .passes_rows = true)
