#include "execution/bind.h"

#include <cmath>
#include <stdexcept>

#include "execution/plan_check.h"
#include "isa/cpu_isa.h"

namespace ingot {
namespace {

constexpr int64_t kPanel = 16;         // plugins/layouts.py
constexpr int64_t kMaxInt8K = 131000;  // MAX_K of plugins/quantised.py

// Bytes of a panel, as in plugins/layouts.py.
int64_t panel_bytes_of(const std::string& dtype, int64_t k, int64_t group) {
  constexpr int64_t kHeader = 128;
  if (dtype == "w8") return kHeader + round_up(k, 64) * kPanel;
  if (dtype == "w4") {
    const int64_t padded_k = round_up(k, 128);
    return kHeader + round_up(round_up(padded_k, group) / group * kPanel, kAlignment) + padded_k / 2 * kPanel;
  }
  return (dtype == "bf16" ? round_up(k, 32) * 2 : k * itemsize_of(dtype)) * kPanel;
}

std::string panel_layout_of(const std::string& dtype, int64_t group) {
  return "panel16." + dtype + (group ? std::string("g").append(std::to_string(group)) : "");
}

// Resolves and checks one step at a time.
class Binder {
 public:
  Binder(const PlanSpec& plan, const PlanMemory& memory, const Batch& batch)
      : plan_(plan), memory_(memory), batch_(batch), kv_(plan.kv) {
    for (const BufferSpec& buffer : plan.buffers) buffers_[buffer.name] = &buffer;
    for (const WeightSpec& weight : plan.weights) weights_[weight.name] = &weight;
  }

  BoundStep bind(const StepSpec& step) {
    step_ = &step;
    const Kernel* kernel = find_kernel(step.kernel);
    check(kernel != nullptr, "this build of ingot has no kernel " + step.kernel);
    check(kernel->op() == step.op, "kernel " + step.kernel + " does not compute op " + step.op);
    check(isa_includes(memory_.isa, kernel->isa()),
          "kernel " + step.kernel + " needs " + std::string(kernel->isa()) + ", this machine offers " + memory_.isa);
    kernel_ = kernel;
    BoundStep bound{step.name, kernel, {}, {}, {}, false, {}, {}, {}};
    if (step.op == "matmul")
      bind_matmul(bound);
    else if (step.op == "embedding")
      bind_embedding(bound);
    else if (step.op == "rms_norm" || step.op == "layer_norm")
      bind_norm(bound);
    else if (step.op == "activation" || step.op == "add" || step.op == "softcap")
      bind_elementwise(bound);
    else if (step.op == "gather_rows")
      bind_gather_rows(bound);
    else if (step.op == "rope_table")
      bind_rope_table(bound);
    else if (step.op == "rope_kv_write")
      bind_rope_kv_write(bound);
    else if (step.op == "paged_attention")
      bind_paged_attention(bound);
    else if (step.op == "moe_route")
      bind_moe_route(bound);
    else if (step.op == "moe_gate_up" || step.op == "moe_down")
      bind_moe_matmul(bound);
    else if (step.op == "screen")
      bind_screen(bound);
    else
      check(false, "op " + step.op + " is not a step of CPU plans");
    for (const std::string& input : step.inputs)
      if (const auto found = buffers_.find(input); found != buffers_.end()) bound.inputs.push_back(found->second);
    for (const std::string& output : step.outputs)
      if (!output.empty()) bound.outputs.push_back(find_buffer(output));
    return bound;
  }

 private:
  void check(bool holds, const std::string& otherwise) const {
    if (!holds) throw std::invalid_argument("step " + step_->name + ": " + otherwise);
  }

  void check_form(size_t inputs, size_t outputs, size_t attrs) const {
    check(step_->inputs.size() == inputs, "takes " + std::to_string(inputs) + " inputs");
    check(step_->outputs.size() == outputs, "gives " + std::to_string(outputs) + " outputs");
    check(step_->attrs.size() == attrs, "takes " + std::to_string(attrs) + " attributes");
  }

  const BufferSpec* find_buffer(const std::string& name) const {
    const auto found = buffers_.find(name);
    check(found != buffers_.end(), "there is no buffer " + name);
    return found->second;
  }

  // A required buffer of `cols` columns.
  const BufferSpec* buffer(const std::string& name, int64_t cols) const {
    const BufferSpec* found = find_buffer(name);
    check(found->cols == cols,
          "buffer " + name + " must have " + std::to_string(cols) + " columns, has " + std::to_string(found->cols));
    return found;
  }

  const BufferSpec* optional_buffer(const std::string& name, int64_t cols) const {
    return name.empty() ? nullptr : buffer(name, cols);
  }

  float* at(const BufferSpec* buffer) const {
    return buffer == nullptr ? nullptr : reinterpret_cast<float*>(memory_.arena + buffer->offset);
  }

  void same_rows(const BufferSpec* a, const BufferSpec* b) const {
    check(a == nullptr || b == nullptr || a->rows == b->rows,
          "inputs and outputs must all count tokens or all count logit rows");
  }

  void counts_tokens(const BufferSpec* buffer) const {
    check(buffer == nullptr || buffer->rows == "tokens", "its buffers must count tokens");
  }

  // Kernels read and write at once: an output may only be an input's own buffer, and only where `in_place` says so.
  void apart(const BufferSpec* output, const BufferSpec* input, bool in_place) const {
    if (output == nullptr || input == nullptr) return;
    const int64_t output_end = output->offset + buffer_rows(plan_, *output) * output->cols * 4;
    const int64_t input_end = input->offset + buffer_rows(plan_, *input) * input->cols * 4;
    if (output_end <= input->offset || input_end <= output->offset) return;
    check(in_place && output->offset == input->offset && output->cols == input->cols && output->rows == input->rows,
          "buffers " + output->name + " and " + input->name + " overlap");
  }

  const WeightSpec* find_weight(const std::string& name) const {
    const auto found = weights_.find(name);
    check(found != weights_.end(), "there is no weight " + name);
    return found->second;
  }

  // A weight whose rows lie one after another, with this type and shape; shape entries of -1 are free.
  const WeightSpec* row_weight(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) const {
    const WeightSpec* weight = find_weight(name);
    const std::string layout = row_layout_of(dtype);
    check(weight->layout == layout && weight->dtype == dtype,
          "weight " + name + " must be " + dtype + " of layout " + layout);
    check(weight->shape.size() == shape.size() && weight->pieces.size() == 1, "weight " + name + " has a wrong shape");
    for (size_t i = 0; i < shape.size(); ++i)
      check(shape[i] < 0 || weight->shape[i] == shape[i], "weight " + name + " must have " + std::to_string(shape[i]) +
                                                              " in dimension " + std::to_string(i) + ", has " +
                                                              std::to_string(weight->shape[i]));
    return weight;
  }

  const std::byte* at(const WeightSpec* weight) const {
    return weight == nullptr ? nullptr : memory_.weights + weight->pieces[0].offset;
  }

  const float* vector(const std::string& name, int64_t n) const {
    return name.empty() ? nullptr : reinterpret_cast<const float*>(at(row_weight(name, "f32", {n})));
  }

  const AttrSpec& attr(const char* key) const {
    const auto found = step_->attrs.find(key);
    check(found != step_->attrs.end(), std::string("attribute ") + key + " is missing");
    return found->second;
  }

  int64_t attr_int(const char* key, int64_t lowest, int64_t highest) const {
    const int64_t* value = std::get_if<int64_t>(&attr(key));
    check(value != nullptr && *value >= lowest && *value <= highest,
          std::string("attribute ") + key + " must be an integer from " + std::to_string(lowest) + " to " +
              std::to_string(highest));
    return *value;
  }

  float attr_float(const char* key) const {
    const double* value = std::get_if<double>(&attr(key));
    check(value != nullptr && std::isfinite(*value),
          std::string("attribute ") + key + " must be a number with a point");
    return static_cast<float>(*value);
  }

  float attr_not_negative(const char* key) const {
    const float value = attr_float(key);
    check(value >= 0, std::string("attribute ") + key + " must not be negative");
    return value;
  }

  std::string attr_word(const char* key) const {
    const std::string* value = std::get_if<std::string>(&attr(key));
    check(value != nullptr, std::string("attribute ") + key + " must be a word");
    return *value;
  }

  Activation attr_activation() const {
    const std::string word = attr_word("activation");
    if (word == "none") return Activation::kNone;
    if (word == "silu") return Activation::kSilu;
    if (word == "gelu") return Activation::kGelu;
    if (word == "gelu_tanh") return Activation::kGeluTanh;
    check(word == "relu", "there is no activation " + word);
    return Activation::kRelu;
  }

  void bind_matmul(BoundStep& bound);
  void bind_embedding(BoundStep& bound);
  void bind_norm(BoundStep& bound);
  void bind_elementwise(BoundStep& bound);
  void bind_gather_rows(BoundStep& bound);
  void bind_rope_table(BoundStep& bound);
  void bind_rope_kv_write(BoundStep& bound);
  void bind_paged_attention(BoundStep& bound);
  void bind_moe_route(BoundStep& bound);
  void bind_moe_matmul(BoundStep& bound);
  void bind_screen(BoundStep& bound);
  const WeightSpec* product_weight(const std::string& name, size_t dimensions, bool gated) const;
  std::vector<Piece> panels(const WeightSpec* weight, int64_t num_panels, int64_t panel_bytes, bool gated) const;
  int64_t attr_group(const std::string& dtype) const;
  void bind_form(BoundStep& bound, size_t inputs, size_t attrs) const;
  PagedKv layer_kv() const;

  const PlanSpec& plan_;
  const PlanMemory& memory_;
  const Batch& batch_;
  KvSizes kv_;
  std::unordered_map<std::string, const BufferSpec*> buffers_;
  std::unordered_map<std::string, const WeightSpec*> weights_;
  const StepSpec* step_ = nullptr;
  const Kernel* kernel_ = nullptr;
};

// The packed weight of a product, [N, K] or [experts, N, K], in the types that the kernel and the step name.
const WeightSpec* Binder::product_weight(const std::string& name, size_t dimensions, bool gated) const {
  const WeightSpec* weight = find_weight(name);
  const std::string& dtype = weight->dtype;
  const std::string rounded = attr_word("activations"), taken(kernel_->dtype());
  check(taken == dtype + (rounded == "int8" ? "a8" : ""), std::string("kernel ") + kernel_->name + " does not take " +
                                                              dtype + " weights with " + rounded + " activations");
  check(rounded == "int8" || rounded == (kernel_->rounds_to_bf16() ? "bf16" : "f32"),
        std::string("kernel ") + kernel_->name + " does not take " + rounded + " activations");
  const int64_t group = attr_group(dtype);
  const std::string layout = panel_layout_of(dtype, group) + (gated ? ".gated" : "");
  check(weight->layout == layout && weight->shape.size() == dimensions,
        "weight " + name + " must be " + (dimensions == 2 ? "[N, K]" : "[experts, N, K]") + " of layout " + layout);
  check(rounded != "int8" || weight->shape.back() <= kMaxInt8K,
        "K = " + std::to_string(weight->shape.back()) + " is too long for int8 activations");
  check(!gated || weight->shape[dimensions - 2] % 2 == 0, "a gated product needs an even number of weight rows");
  return weight;
}

// The weight's pieces, which must hold panels 0 .. num_panels-1 (of every expert) in order and lie inside the weights
// section. panel_bytes: of all experts together.
std::vector<Piece> Binder::panels(const WeightSpec* weight, int64_t num_panels, int64_t panel_bytes, bool gated) const {
  std::vector<Piece> pieces;
  int64_t next = 0;
  for (const PieceSpec& piece : weight->pieces) {
    check(piece.begin == next && piece.end > piece.begin && piece.end <= num_panels,
          "the pieces of weight " + weight->name + " are not in order");
    const int64_t bytes = product(piece.end - piece.begin, panel_bytes);
    check(piece.offset >= 0 && piece.offset % kAlignment == 0 && bytes <= memory_.weight_bytes - piece.offset,
          "weight " + weight->name + " lies outside the weights section");
    check(!gated || (piece.begin % 2 == 0 && piece.end % 2 == 0),
          "a piece of weight " + weight->name + " parts gate from up");
    pieces.push_back({piece.begin, piece.end, memory_.weights + piece.offset});
    next = piece.end;
  }
  check(next == num_panels, "the pieces of weight " + weight->name + " hold " + std::to_string(next) +
                                " panels, expected " + std::to_string(num_panels));
  check(weight->nbytes == product(num_panels, panel_bytes),
        "weight " + weight->name + " says that it has " + std::to_string(weight->nbytes) + " bytes");
  return pieces;
}

int64_t Binder::attr_group(const std::string& dtype) const {
  const int64_t group = attr_int("group", 0, 128);
  check(dtype == "w4" ? group == 32 || group == 64 || group == 128 : group == 0,
        "a " + dtype + " weight does not come in groups of " + std::to_string(group));
  return group;
}

// Of a product, which has one more attribute where a build has timed its ways: a digit for each class of rows.
void Binder::bind_form(BoundStep& bound, size_t inputs, size_t attrs) const {
  const bool tuned = step_->attrs.contains("tactics");
  check_form(inputs, 1, attrs + tuned);
  if (!tuned) return;
  const std::string word = attr_word("tactics"), digits("0123456789", static_cast<size_t>(kernel_->tactics()));
  check(word.size() == bound.tactics.size() && word.find_first_not_of(digits) == std::string::npos,
        "attribute tactics must be four digits, each below " + std::to_string(digits.size()) + ", got " + word);
  for (size_t i = 0; i < word.size(); ++i) bound.tactics[i] = word[i] - '0';
}

void Binder::bind_matmul(BoundStep& bound) {
  bind_form(bound, 4, 4);
  const bool gated = attr_int("gated", 0, 1) == 1;
  const WeightSpec* weight = product_weight(step_->inputs[1], 2, gated);
  const int64_t n = weight->shape[0], k = weight->shape[1], group = attr_group(weight->dtype);
  const int64_t out = gated ? n / 2 : n;
  const int64_t num_panels = gated ? 2 * round_up(n / 2, kPanel) / kPanel : round_up(n, kPanel) / kPanel;
  const BufferSpec* x = buffer(step_->inputs[0], k);
  const BufferSpec* residual = optional_buffer(step_->inputs[3], out);
  const BufferSpec* y = buffer(step_->outputs[0], out);
  same_rows(x, y);
  same_rows(x, residual);
  apart(y, x, false);
  apart(y, residual, true);
  bound.pieces = panels(weight, num_panels, panel_bytes_of(weight->dtype, k, group), gated);
  bound.counts_logits = x->rows == "logits";
  bound.args = MatmulArgs{.x = at(x),
                          .pieces = bound.pieces.data(),
                          .num_pieces = static_cast<int64_t>(bound.pieces.size()),
                          .num_panels = num_panels,
                          .bias = vector(step_->inputs[2], n),
                          .residual = at(residual),
                          .y = at(y),
                          .rows = 0,
                          .n = n,
                          .k = k,
                          .activation = attr_activation(),
                          .gated = gated,
                          .group = group};
}

void Binder::bind_embedding(BoundStep& bound) {
  check_form(2, 1, 1);
  const std::string dtype(kernel_->dtype());
  const BufferSpec* y = find_buffer(step_->outputs[0]);
  counts_tokens(y);
  const WeightSpec* table = row_weight(step_->inputs[0], dtype, {-1, y->cols});
  const WeightSpec* positions = step_->inputs[1].empty() ? nullptr : row_weight(step_->inputs[1], dtype, {-1, y->cols});
  check(table->shape[0] >= plan_.limits.vocab_size, "the token table has fewer rows than the vocabulary");
  check(positions == nullptr || positions->shape[0] >= plan_.limits.max_positions,
        "the position table has fewer rows than there are positions");
  bound.args = EmbeddingArgs{.ids = batch_.ids.data(),
                             .positions = batch_.positions.data(),
                             .table = at(table),
                             .position_table = at(positions),
                             .y = at(y),
                             .tokens = 0,
                             .hidden = y->cols,
                             .scale = attr_float("scale")};
}

void Binder::bind_norm(BoundStep& bound) {
  const bool has_bias = step_->op == "layer_norm";
  check_form(has_bias ? 4 : 3, 2, 1);
  const BufferSpec* x = find_buffer(step_->inputs[0]);
  const BufferSpec* residual = optional_buffer(step_->inputs[has_bias ? 3 : 2], x->cols);
  const BufferSpec* y = buffer(step_->outputs[0], x->cols);
  const BufferSpec* sum = optional_buffer(step_->outputs[1], x->cols);
  for (const BufferSpec* other : {residual, y, sum}) same_rows(x, other);
  for (const BufferSpec* input : {x, residual}) {
    apart(y, input, true);
    apart(sum, input, true);
  }
  apart(y, sum, false);
  const float* weight = vector(step_->inputs[1], x->cols);
  check(weight != nullptr, "input weight is missing");
  bound.counts_logits = x->rows == "logits";
  bound.args = NormArgs{.x = at(x),
                        .weight = weight,
                        .bias = has_bias ? vector(step_->inputs[2], x->cols) : nullptr,
                        .residual = at(residual),
                        .y = at(y),
                        .sum = at(sum),
                        .rows = 0,
                        .hidden = x->cols,
                        .eps = attr_not_negative("eps")};
}

void Binder::bind_elementwise(BoundStep& bound) {
  const bool is_add = step_->op == "add", is_cap = step_->op == "softcap";
  check_form(is_cap ? 1 : 2, 1, is_add ? 0 : 1);
  const BufferSpec* a = find_buffer(step_->inputs[0]);
  const BufferSpec* b = is_cap ? nullptr : optional_buffer(step_->inputs[1], a->cols);
  const float cap = is_cap ? attr_float("cap") : 0.0f;
  check(!is_cap || cap > 0, "attribute cap must be above 0");
  const BufferSpec* y = buffer(step_->outputs[0], a->cols);
  check(!is_add || b != nullptr, "input b is missing");
  same_rows(a, b);
  same_rows(a, y);
  apart(y, a, true);
  apart(y, b, true);
  bound.counts_logits = a->rows == "logits";
  bound.args = ElementwiseArgs{.a = at(a),
                               .b = at(b),
                               .y = at(y),
                               .rows = 0,
                               .cols = a->cols,
                               .activation = is_add || is_cap ? Activation::kNone : attr_activation(),
                               .cap = cap};
}

void Binder::bind_gather_rows(BoundStep& bound) {
  check_form(1, 1, 0);
  const BufferSpec* x = find_buffer(step_->inputs[0]);
  const BufferSpec* y = buffer(step_->outputs[0], x->cols);
  counts_tokens(x);
  check(y->rows == "logits", "its output must count logit rows");
  apart(y, x, false);
  bound.counts_logits = true;
  bound.args = GatherRowsArgs{.x = at(x), .rows = batch_.logit_rows.data(), .y = at(y), .num_rows = 0, .cols = x->cols};
}

void Binder::bind_rope_table(BoundStep& bound) {
  check_form(1, 1, 1);
  const BufferSpec* y = find_buffer(step_->outputs[0]);
  counts_tokens(y);
  check(y->cols % 2 == 0, "its output must have an even number of columns");
  const float* inv_freq = vector(step_->inputs[0], y->cols / 2);
  check(inv_freq != nullptr, "input inv_freq is missing");
  bound.args = RopeTableArgs{.inv_freq = inv_freq,
                             .positions = batch_.positions.data(),
                             .y = at(y),
                             .tokens = 0,
                             .half = y->cols / 2,
                             .scale = attr_float("scale")};
}

// The step's layer of the KV cache; attributes must agree with the plan's KV layout.
PagedKv Binder::layer_kv() const {
  const KvSpec& kv = plan_.kv;
  check(kernel_->dtype() == kv.dtype,
        "the KV cache is " + kv.dtype + ", kernel " + kernel_->name + " takes " + std::string(kernel_->dtype()));
  const int64_t layer = attr_int("layer", 0, kv.num_layers - 1);
  attr_int("kv_heads", kv.kv_heads, kv.kv_heads);
  attr_int("head_dim", kv.head_dim, kv.head_dim);
  return PagedKv{.keys = memory_.kv + kv_.offset(layer, false),
                 .values = memory_.kv + kv_.offset(layer, true),
                 .block_bytes = kv_.block,
                 .kv_heads = kv.kv_heads,
                 .head_dim = kv.head_dim,
                 .padded_dim = kv_.padded_dim,
                 .block_size = kv.tokens_per_block,
                 .block_tables = nullptr,
                 .table_width = 0,
                 .query_starts = batch_.query_starts.data(),
                 .past_lengths = batch_.past_lengths.data(),
                 .positions = batch_.positions.data(),
                 .sequence_of = batch_.sequence_of.data(),
                 .sequences = 0,
                 .tokens = 0};
}

void Binder::bind_rope_kv_write(BoundStep& bound) {
  check_form(4, 1, 6);
  const PagedKv kv = layer_kv();
  const int64_t heads = attr_int("heads", 1, 4096);
  const BufferSpec* qkv = buffer(step_->inputs[0], (heads + 2 * kv.kv_heads) * kv.head_dim);
  const BufferSpec* q = buffer(step_->outputs[0], heads * kv.head_dim);
  const BufferSpec* cos_sin = step_->inputs[1].empty() ? nullptr : find_buffer(step_->inputs[1]);
  check(cos_sin == nullptr || (cos_sin->cols % 2 == 0 && cos_sin->cols <= kv.head_dim),
        "cos_sin must have an even number of columns up to head_dim");
  for (const BufferSpec* each : {qkv, q, cos_sin}) counts_tokens(each);
  apart(q, qkv, false);
  apart(q, cos_sin, false);
  // the norm's weight is as long as a head or as all heads
  const auto run = [&](const std::string& name, int64_t count) {
    const int64_t n = name.empty() ? kv.head_dim : find_weight(name)->shape[0];
    check(n == kv.head_dim || n == count * kv.head_dim, "weight " + name + " must be as long as one head or all heads");
    return n;
  };
  const int64_t q_run = run(step_->inputs[2], heads), k_run = run(step_->inputs[3], kv.kv_heads);
  bound.args = RopeKvWriteArgs{.qkv = at(qkv),
                               .cos_sin = at(cos_sin),
                               .q = at(q),
                               .q_norm = vector(step_->inputs[2], q_run),
                               .k_norm = vector(step_->inputs[3], k_run),
                               .kv = kv,
                               .heads = heads,
                               .half = cos_sin == nullptr ? 0 : cos_sin->cols / 2,
                               .q_run = q_run,
                               .k_run = k_run,
                               .norm_eps = attr_not_negative("norm_eps"),
                               .interleaved = attr_int("interleaved", 0, 1) == 1};
}

void Binder::bind_paged_attention(BoundStep& bound) {
  check_form(1, 1, 7);
  const PagedKv kv = layer_kv();
  const int64_t heads = attr_int("heads", 1, 4096);
  check(heads % kv.kv_heads == 0, "heads must be a multiple of kv_heads");
  const BufferSpec* q = buffer(step_->inputs[0], heads * kv.head_dim);
  const BufferSpec* y = buffer(step_->outputs[0], heads * kv.head_dim);
  counts_tokens(q);
  counts_tokens(y);
  apart(y, q, false);
  const int64_t window = attr_int("window", 0, kMaxCount);
  bound.args = PagedAttentionArgs{.q = at(q),
                                  .y = at(y),
                                  .kv = kv,
                                  .heads = heads,
                                  .window = window == 0 ? kMaxCount : window,
                                  .scale = attr_float("scale"),
                                  .softcap = attr_not_negative("softcap")};
}

void Binder::bind_moe_route(BoundStep& bound) {
  check_form(1, 2, 2);
  const BufferSpec* logits = find_buffer(step_->inputs[0]);
  const int64_t slots = attr_int("per_token", 1, logits->cols);
  const BufferSpec* ids = buffer(step_->outputs[0], slots);
  const BufferSpec* weights = buffer(step_->outputs[1], slots);
  for (const BufferSpec* each : {ids, weights}) same_rows(logits, each);
  bound.counts_logits = logits->rows == "logits";
  apart(ids, logits, false);
  apart(weights, logits, false);
  apart(ids, weights, false);
  bound.args = MoeRouteArgs{.logits = at(logits),
                            .ids = at(ids),
                            .weights = at(weights),
                            .rows = 0,
                            .experts = logits->cols,
                            .slots = slots,
                            .normalized = attr_int("normalized", 0, 1) == 1};
}

void Binder::bind_moe_matmul(BoundStep& bound) {
  const bool gated = step_->op == "moe_gate_up";
  bind_form(bound, gated ? 3 : 4, gated ? 3 : 2);
  const WeightSpec* weight = product_weight(step_->inputs.back(), 3, gated);
  const int64_t group = attr_group(weight->dtype);
  const int64_t experts = weight->shape[0], n = weight->shape[1], k = weight->shape[2];
  const BufferSpec* ids = find_buffer(step_->inputs[1]);
  const int64_t slots = ids->cols;
  check(slots <= experts && product(buffer_rows(plan_, *ids), slots) < kMaxCount, "a row takes too many experts");
  check(experts < 65536, "there are too many experts");
  const BufferSpec* x = buffer(step_->inputs[0], gated ? k : product(slots, k));
  const BufferSpec* weights = gated ? nullptr : buffer(step_->inputs[2], slots);
  const BufferSpec* y = buffer(step_->outputs[0], gated ? product(slots, n / 2) : n);
  for (const BufferSpec* each : {x, weights, y}) same_rows(ids, each);
  bound.counts_logits = ids->rows == "logits";
  for (const BufferSpec* input : {x, ids, weights}) apart(y, input, false);
  const int64_t num_panels = gated ? 2 * round_up(n / 2, kPanel) / kPanel : round_up(n, kPanel) / kPanel;
  bound.pieces = panels(weight, num_panels, product(experts, panel_bytes_of(weight->dtype, k, group)), gated);
  bound.args = MoeMatmulArgs{.x = at(x),
                             .ids = at(ids),
                             .weights = at(weights),
                             .pieces = bound.pieces.data(),
                             .num_panels = num_panels,
                             .y = at(y),
                             .rows = 0,
                             .slots = slots,
                             .experts = experts,
                             .n = n,
                             .k = k,
                             .group = group,
                             .activation = gated ? attr_activation() : Activation::kNone};
}

void Binder::bind_screen(BoundStep& bound) {
  check_form(5, 0, 1);
  const BufferSpec* x = find_buffer(step_->inputs[0]);
  const int64_t k = x->cols, vocab = plan_.limits.vocab_size, group = attr_group("w4");
  const WeightSpec* codes = find_weight(step_->inputs[2]);
  const bool fits = codes->layout == panel_layout_of("w4", group) && codes->shape == std::vector{vocab, k};
  check(fits, "weight " + codes->name + " must hold a row of w4 codes for each token");
  const WeightSpec* table = row_weight(step_->inputs[4], "w8", {-1, k});
  check(table->shape[0] >= vocab, "the table has fewer rows than the vocabulary");
  const auto* dither = reinterpret_cast<const float*>(at(row_weight(step_->inputs[3], "f32", {k})));
  const int64_t panel_bytes = panel_bytes_of("w4", k, group);
  for (const Piece& piece : panels(codes, round_up(vocab, kPanel) / kPanel, panel_bytes, false))
    for (const std::byte* at = piece.data; at < piece.data + (piece.end - piece.begin) * panel_bytes; at += panel_bytes)
      bound.scales.insert(bound.scales.end(), reinterpret_cast<const float*>(at),
                          reinterpret_cast<const float*>(at) + kPanel);
  bound.counts_logits = true;
  bound.args = ScreenArgs{.x = at(x),
                          .centres = at(buffer(step_->inputs[1], vocab)),
                          .scales = bound.scales.data(),
                          .dither = dither,
                          .table = at(table),
                          .rows = 0,
                          .vocab = vocab,
                          .k = k,
                          .row_bytes = row_bytes_of("w8", k),
                          .ids = nullptr,
                          .candidates = nullptr};
}

}  // namespace

std::vector<BoundStep> bind_steps(const PlanSpec& plan, const std::vector<StepSpec>& steps, const PlanMemory& memory,
                                  const Batch& batch) {
  for (const WeightSpec& weight : plan.weights) check_weight(weight, memory.weight_bytes);
  Binder binder(plan, memory, batch);
  std::vector<BoundStep> bound;
  for (const StepSpec& step : steps) bound.push_back(binder.bind(step));
  return bound;
}

}  // namespace ingot
