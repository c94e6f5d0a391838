#include "execution/binder.h"
#include "ranks/recv_args.h"

namespace ingot {
namespace {

void bind_recv(const Binder& step, BoundStep& bound) {
  step.check_form(0, 1, 4);
  const BufferSpec* y = step.buffer(step.spec().outputs[0], step.attr_int("columns", 1, kMaxCount));
  step.counts_tokens(y);
  const Message& message = step.message();
  bound.args = RecvArgs{.group = step.stages(), .message = message, .y = step.at(y), .rows = 0, .cols = y->cols};
}

}  // namespace
}  // namespace ingot

INGOT_OP("recv", RecvArgs, ingot::bind_recv, .passes_rows = true)
