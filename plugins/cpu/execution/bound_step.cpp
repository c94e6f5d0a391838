#include "execution/bind.h"

namespace ingot {

const void* BoundStep::arguments() const {
  return std::visit([](const auto& each) -> const void* { return &each; }, args);
}

void BoundStep::set_counts(const Batch& batch) {
  const int64_t rows = counts_logits ? batch.rows : batch.tokens;
  const auto set_kv = [&batch](PagedKv& kv) {
    kv.tokens = batch.tokens;
    kv.sequences = batch.sequences;
    kv.block_tables = batch.block_tables.data();
    kv.table_width = batch.table_width;
  };
  const int32_t tactic = tactics[rows <= 1 ? 0 : rows <= 8 ? 1 : rows <= 32 ? 2 : 3];
  if (auto* matmul = std::get_if<MatmulArgs>(&args)) {
    matmul->rows = rows;
    matmul->tactic = tactic;
  }
  if (auto* embedding = std::get_if<EmbeddingArgs>(&args)) embedding->tokens = rows;
  if (auto* norm = std::get_if<NormArgs>(&args)) norm->rows = rows;
  if (auto* elementwise = std::get_if<ElementwiseArgs>(&args)) elementwise->rows = rows;
  if (auto* gather = std::get_if<GatherRowsArgs>(&args)) gather->num_rows = rows;
  if (auto* table = std::get_if<RopeTableArgs>(&args)) table->tokens = rows;
  if (auto* route = std::get_if<MoeRouteArgs>(&args)) route->rows = rows;
  if (auto* experts = std::get_if<MoeMatmulArgs>(&args)) {
    experts->rows = rows;
    experts->tactic = tactic;
  }
  if (auto* screen = std::get_if<ScreenArgs>(&args)) screen->rows = rows;
  if (auto* write = std::get_if<RopeKvWriteArgs>(&args)) set_kv(write->kv);
  if (auto* attention = std::get_if<PagedAttentionArgs>(&args)) set_kv(attention->kv);
}

}  // namespace ingot
