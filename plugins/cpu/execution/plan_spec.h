// A Plan as it comes from Python: the fields of src/ingot/plan.py. Nothing here is trusted; plan_check.cpp and bindings
// check it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "ingot/kernel.h"

namespace ingot {

struct InputSpec {
  std::string name;
  std::string dtype;
  std::string extent;  // what its first dimension counts, see Extent in src/ingot/plan.py
};

struct BufferSpec {
  std::string name;
  std::string rows;  // "tokens" or "logits"
  int64_t cols;
  int64_t offset;
  std::string dtype;
};

struct WeightSliceSpec {
  int64_t begin, end, offset;
};

struct WeightSpec {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string layout;
  int64_t nbytes;
  std::vector<WeightSliceSpec> pieces;
};

using AttrSpec = std::variant<int64_t, double, std::string>;

struct StepSpec {
  std::string name;
  std::string op;
  std::string kernel;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::map<std::string, AttrSpec> attrs;
};

struct CacheSpec {
  int64_t window;
  std::vector<int64_t> layers;
  int64_t kv_heads, head_dim, tokens_per_block;
  std::string dtype;
  int64_t num_blocks;
  std::vector<int64_t> state;  // float32 numbers in each layer; empty: keys and values
  int64_t latent;              // how many of a key's numbers are the value too; 0: values lie apart
};

struct LimitsSpec {
  int64_t vocab_size, max_positions, max_batch_size, max_num_tokens, max_logit_rows;
};

// Call and Variant of src/ingot/plan.py.
struct CallSpec {
  std::string step;
  std::vector<std::string> inside;
  bool kv_only;
  bool computes_own;  // "private" in Python
  bool reads_private;
  bool waits;
};

struct VariantSpec {
  std::string name;
  int64_t most_tokens;
  std::vector<CallSpec> calls;
};

struct PlanSpec {
  LimitsSpec limits;
  std::vector<CacheSpec> caches;
  std::vector<InputSpec> inputs;
  std::vector<BufferSpec> buffers;
  std::vector<WeightSpec> weights;
  std::vector<StepSpec> steps;
  std::vector<VariantSpec> variants;
  int64_t arena_bytes;
  std::string logits;
  std::string draw_kernel;

  int64_t num_layers() const {  // with keys and values
    int64_t count = 0;
    for (const CacheSpec& cache : caches) count += static_cast<int64_t>(cache.layers.size());
    return count;
  }
};

}  // namespace ingot
