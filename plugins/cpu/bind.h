// From a plan's step to a kernel call: every name, shape, offset and attribute is checked here, once, at open.
#pragma once

#include <array>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "batch.h"
#include "plan_spec.h"
#include "registry.h"

namespace ingot {

using KernelArgs = std::variant<MatmulArgs, EmbeddingArgs, NormArgs, ElementwiseArgs, GatherRowsArgs, RopeTableArgs,
                                RopeKvWriteArgs, PagedAttentionArgs, MoeRouteArgs, MoeMatmulArgs, ScreenArgs>;

struct BoundStep {
  std::string name;
  const Kernel* kernel;
  KernelArgs args;
  std::vector<const BufferSpec*> inputs, outputs;
  bool counts_logits;  // rows are the step's logit rows, else its tokens
  std::vector<Piece> pieces;
  std::vector<float> scales;  // of a screen, copied: in the panels they lie pages apart
  std::array<int32_t, 4> tactics{};  // of a product with 1, 2-8, 9-32 and more rows

  const void* arguments() const;
  void set_counts(const Batch& batch);  // rows, tokens, block tables
};

// What a plan's offsets point into.
struct PlanMemory {
  const std::byte* weights;
  int64_t weight_bytes;
  std::byte* arena;
  std::byte* kv;
  std::string isa;  // kernels of higher levels are refused
};

// Bytes of a layer's keys and values in a block, of a block, and of all; see KvLayout in src/ingot/plan.py.
struct KvSizes {
  explicit KvSizes(const KvSpec& kv);  // throws std::invalid_argument
  int64_t itemsize, padded_dim, k_block, v_block, block, total;
  int64_t offset(int64_t layer, bool values) const { return layer * (k_block + v_block) + (values ? k_block : 0); }
};

// Throws std::invalid_argument that names the step or buffer and what is wrong.
void check_plan(const PlanSpec& plan);
std::vector<BoundStep> bind_steps(const PlanSpec& plan, const std::vector<StepSpec>& steps, const PlanMemory& memory, const Batch& batch);
int64_t buffer_rows(const PlanSpec& plan, const BufferSpec& buffer);

}  // namespace ingot
