#include "execution/plan_check.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>
#include <utility>

#include "execution/weight_bytes.h"

namespace ingot {
namespace {

constexpr int64_t kMaxRows = 1LL << 21;  // of a step: arrays of this length are allocated at open

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

void require_count(const std::string& what, int64_t value, int64_t end = kMaxCount) {
  require(value >= 1 && value < end, what + " is out of range: " + std::to_string(value));
}

// The inputs of a step that sessions give, those of src/ingot/step_inputs.py: name, then what it counts.
constexpr std::pair<const char*, const char*> kInputs[] = {
    {"input_ids", "tokens"},       {"positions", "tokens"},
    {"token_sequences", "tokens"}, {"query_starts", "sequence_bounds"},
    {"past_lengths", "sequences"}, {"block_tables", "sequence_blocks"},
    {"logit_rows", "logits"},      {"whole_rows", "logits"},
};

void check_input(const InputSpec& input) {
  std::string known;
  for (const auto& [name, extent] : kInputs) {
    if (input.name == name && input.dtype == "i32" && input.extent == extent) return;
    known += std::string(known.empty() ? "" : ", ") + name + " (i32 by " + extent + ")";
  }
  throw std::invalid_argument("the plan asks for the input " + input.name + " (" + input.dtype + " by " + input.extent +
                              "), this version of ingot gives " + known);
}

// A name stands for one input, buffer or weight, for one step, and for one variant.
void check_names(const PlanSpec& plan) {
  std::set<std::string> known, steps, variants;
  const auto add = [](std::set<std::string>& names, const std::string& name) {
    require(!name.empty() && names.insert(name).second,
            name.empty() ? "an input, buffer, weight, kernel call or variant has no name" : "two are called " + name);
  };
  for (const InputSpec& input : plan.inputs) add(known, input.name);
  for (const BufferSpec& buffer : plan.buffers) add(known, buffer.name);
  for (const WeightSpec& weight : plan.weights) add(known, weight.name);
  for (const StepSpec& step : plan.steps) add(steps, step.name);
  for (const VariantSpec& variant : plan.variants) add(variants, variant.name);
}

// Layers are numbered from 0, and each is in one group. A request has as many blocks in each group.
void check_caches(const std::vector<CacheSpec>& caches) {
  require(!caches.empty(), "the plan has no cache groups");
  std::set<int64_t> layers;
  size_t count = 0;
  for (const CacheSpec& cache : caches) {
    require(cache.tokens_per_block == caches[0].tokens_per_block, "cache groups have blocks of different lengths");
    layers.insert(cache.layers.begin(), cache.layers.end());
    count += cache.layers.size();
  }
  require(count > 0 && layers.size() == count && *layers.begin() == 0 && *layers.rbegin() + 1 == std::ssize(layers),
          "each layer from 0 on must be in one cache group");
}

}  // namespace

int64_t product(int64_t a, int64_t b, int64_t c) {
  int64_t ab = 0, abc = 0;
  require(!__builtin_mul_overflow(a, b, &ab) && !__builtin_mul_overflow(ab, c, &abc), "a size exceeds 2^63 bytes");
  return abc;
}

void check_weight(const WeightSpec& weight, int64_t weight_bytes) {
  const std::string where = "weight " + weight.name + ": ";
  require(itemsize_of(weight.dtype) > 0, where + "unknown type " + weight.dtype);
  require(!weight.shape.empty() && weight.shape.size() <= (weight.layout == "row" ? 2 : 3) && !weight.pieces.empty(),
          where + "wrong shape");
  for (const int64_t extent : weight.shape) require_count(where + "extent", extent);
  if (weight.layout != row_layout_of(weight.dtype)) return;  // panels are checked by the step that multiplies with them
  const int64_t bytes =
      product(weight.shape[0], row_bytes_of(weight.dtype, weight.shape.size() == 2 ? weight.shape[1] : 1));
  require(bytes == weight.nbytes, where + "says that it has " + std::to_string(weight.nbytes) +
                                      " bytes, its rows have " + std::to_string(bytes));
  const WeightSliceSpec& piece = weight.pieces[0];
  require(weight.pieces.size() == 1 && piece.begin == 0 && piece.end == weight.shape[0],
          where + "layout " + weight.layout + " has one piece with all rows");
  require(piece.offset >= 0 && piece.offset % kAlignment == 0 && bytes <= weight_bytes - piece.offset,
          where + "lies outside the weights section");
}

CacheSizes::CacheSizes(const CacheSpec& kv) {
  itemsize = itemsize_of(kv.dtype);
  const bool codes = kv.dtype == "int8" || kv.dtype == "f8";
  require(codes || kv.dtype == "f32" || kv.dtype == "bf16", "KV caches are f32, bf16, int8 or f8, got " + kv.dtype);
  require(kv.window >= 0 && kv.window < kMaxCount, "the window of a cache group is out of range");
  require(!kv.layers.empty() && kv.layers.size() < 65536, "the number of KV layers is out of range");
  require(kv.tokens_per_block >= 16 && kv.tokens_per_block <= 512 && kv.tokens_per_block % 16 == 0,
          "tokens_per_block must be a multiple of 16 from 16 to 512, got " + std::to_string(kv.tokens_per_block));
  require_count("num_blocks", kv.num_blocks);
  if (!kv.state.empty()) {
    require(kv.state.size() == kv.layers.size() && kv.window == kStateWindow && kv.kv_heads == 0 && kv.head_dim == 0 &&
                kv.dtype == "f32",
            "a cache group with states has a size for each layer, a window of 2, no heads, and float32 numbers");
    for (const int64_t numbers : kv.state) {
      require_count("a state", numbers);
      state_offsets.push_back(block);
      block += round_up(numbers * 4, kAlignment);
    }
    total = product(kv.num_blocks, block);
    return;
  }
  require(kv.kv_heads >= 1 && kv.kv_heads <= 4096, "kv_heads is out of range");
  const int64_t most = kv.latent == 0 ? 512 : 1024;
  require(
      kv.head_dim >= 4 && kv.head_dim <= most && kv.head_dim % 4 == 0,
      "head_dim must be a multiple of 4 from 4 to " + std::to_string(most) + ", got " + std::to_string(kv.head_dim));
  if (kv.latent != 0) {
    require(kv.latent >= 4 && kv.latent <= kv.head_dim && kv.latent % 4 == 0 && kv.kv_heads == 1 && kv.window == 0 &&
                !codes,
            "a latent cache group has one head, no window, no codes, and values within its keys");
    padded_dim = round_up(kv.latent, 16);
    k_block = kv.tokens_per_block * kv.head_dim * itemsize;
    block = product(static_cast<int64_t>(kv.layers.size()), k_block);
    total = product(kv.num_blocks, block);
    return;
  }
  padded_dim = round_up(kv.head_dim, 16);
  const int64_t scale = codes ? 4 : 0;  // bytes behind the numbers of a token and head
  k_block = kv.kv_heads * kv.tokens_per_block * (kv.head_dim * itemsize + scale);
  v_block = kv.kv_heads * kv.tokens_per_block * (padded_dim * itemsize + scale);
  block = product(static_cast<int64_t>(kv.layers.size()), k_block + v_block);
  total = product(kv.num_blocks, block);
}

LayerPlace find_layer(const std::vector<CacheSpec>& caches, int64_t layer) {
  for (size_t group = 0; group < caches.size(); ++group) {
    const std::vector<int64_t>& layers = caches[group].layers;
    if (const auto found = std::ranges::find(layers, layer); found != layers.end())
      return {static_cast<int64_t>(group), found - layers.begin()};
  }
  throw std::invalid_argument("no cache group has layer " + std::to_string(layer));
}

int64_t buffer_rows(const PlanSpec& plan, const BufferSpec& buffer) {
  return buffer.rows == "tokens" ? plan.limits.max_num_tokens : plan.limits.max_logit_rows;
}

void check_plan(const PlanSpec& plan) {
  require_count("vocab_size", plan.limits.vocab_size);
  require_count("max_positions", plan.limits.max_positions);
  require_count("max_batch_size", plan.limits.max_batch_size, kMaxRows);
  require_count("max_num_tokens", plan.limits.max_num_tokens, kMaxRows);
  require_count("max_logit_rows", plan.limits.max_logit_rows, kMaxRows);
  require(plan.arena_bytes >= 0, "arena_bytes is negative");
  require(!plan.steps.empty(), "the plan has no kernel calls");
  check_names(plan);
  check_caches(plan.caches);
  for (const InputSpec& input : plan.inputs) check_input(input);
  const BufferSpec* logits = nullptr;
  for (const BufferSpec& buffer : plan.buffers) {
    const std::string where = "buffer " + buffer.name + ": ";
    require(buffer.rows == "tokens" || buffer.rows == "logits", where + "counts neither tokens nor logits");
    require_count(where + "cols", buffer.cols);
    require(buffer.dtype == "f32", where + "is " + buffer.dtype + ", CPU kernels store f32 alone");
    const int64_t bytes = product(buffer_rows(plan, buffer), buffer.cols, 4);
    require(buffer.offset >= 0 && buffer.offset % kAlignment == 0 && bytes <= plan.arena_bytes - buffer.offset,
            where + "lies outside the arena");
    if (buffer.name == plan.logits) logits = &buffer;
  }
  if (plan.logits.empty()) return;  // of a pipeline stage that is not the last
  require(logits != nullptr && logits->rows == "logits" && logits->cols == plan.limits.vocab_size,
          "the plan's logits must be a buffer of logit rows with vocab_size columns");
}

}  // namespace ingot
