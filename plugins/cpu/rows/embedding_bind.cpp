#include "execution/binder.h"
#include "rows/embedding_args.h"

namespace ingot {
namespace {

void bind_embedding(const Binder& step, BoundStep& bound) {
  step.check_form(4, 1, 1);
  const std::string dtype(step.kernel().dtype());
  const BufferSpec* y = step.find_buffer(step.spec().outputs[0]);
  step.counts_tokens(y);
  const WeightSpec* table = step.row_weight(step.spec().inputs[0], dtype, {-1, y->cols});
  const WeightSpec* positions =
      step.spec().inputs[1].empty() ? nullptr : step.row_weight(step.spec().inputs[1], dtype, {-1, y->cols});
  step.check(table->shape[0] >= step.plan().limits.vocab_size,
             "the token table has " + std::to_string(table->shape[0]) + " rows, expected at least " +
                 std::to_string(step.plan().limits.vocab_size) + ", one for each token");
  step.check(positions == nullptr || positions->shape[0] >= step.plan().limits.max_positions,
             "the position table must have a row for each of " + std::to_string(step.plan().limits.max_positions) +
                 " positions");
  step.check(positions != nullptr || step.spec().inputs[3].empty(),
             "input positions is given without a position table");
  bound.args = EmbeddingArgs{.ids = step.given(2, "input_ids"),
                             .positions = positions == nullptr ? nullptr : step.given(3, "positions"),
                             .table = step.at(table),
                             .position_table = step.at(positions),
                             .y = step.at(y),
                             .rows = 0,
                             .hidden = y->cols,
                             .scale = step.attr_float("scale")};
}

}  // namespace
}  // namespace ingot

INGOT_OP("embedding", EmbeddingArgs, ingot::bind_embedding, .shares_by_rows = true)
