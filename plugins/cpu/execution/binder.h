// What binding a step checks, whatever its op; and the table of ops that the INGOT_OP lines fill while the module
// loads.
//
//   plugins/cpu/<group>/<op>_bind.cpp   INGOT_OP("relu2", Relu2Args, ingot::bind_relu2, .shares_by_rows = true)
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "attention/paged_kv.h"
#include "execution/bind.h"
#include "execution/plan_check.h"
#include "execution/weight_bytes.h"
#include "isa/cpu_isa.h"
#include "matmul/activations.h"
#include "recurrent/state_slots.h"

namespace ingot {

class Binder;

// An op of CPU plans, registered where its kernels lie.
struct Op {
  const char* name;
  const std::type_info* args;                          // the struct that its kernels take
  void (*bind)(const Binder& step, BoundStep& bound);  // checks the step and fills the struct of its kernels
  bool shares_by_rows = false;      // its kernels take nothing from the team but their share of the rows
  bool takes_private_rows = false;  // x may lie in the memory of each thread, computed by itself
  bool meets_ranks = false;         // its kernels wait for the other ranks of the stage
  bool leaves_sums = false;         // and may leave their output where they met
  bool passes_rows = false;         // its kernels pass rows from stage to stage
  bool norms_rows = false;          // those of its kernels that prepare rows, into scratch, norm each one where told to
  int32_t (*tactics)(const Kernel& kernel) = nullptr;  // how many ways a plan may choose from; null: there is one
};

// What a kernel computes; null for one that is no step of a plan.
const Op* find_op(const Kernel& kernel);

// Why a kernel was not registered for an op that there is, with that op's struct; empty if it was.
std::string registration_problem(const Kernel& kernel);
// When all are registered. Throws std::logic_error.
void require_registrations();

// What the kernel's op says of it.
bool norms_rows(const Kernel& kernel);
int32_t tactics_of(const Kernel& kernel);

// That of kernels which take an ElementsArgs (rows/elements_args.h); null for another struct.
const Op* find_elements_op(const std::type_info& args);

struct OpEntry {
  explicit OpEntry(Op op);
};

// Resolves and checks one step at a time. Whatever does not hold throws std::invalid_argument that names the step.
class Binder {
 public:
  Binder(const PlanSpec& plan, const PlanMemory& memory, const Batch& batch)
      : plan_(plan), memory_(memory), batch_(batch) {
    for (const CacheSpec& cache : plan.caches) caches_.emplace_back(cache);
    for (const BufferSpec& buffer : plan.buffers) buffers_[buffer.name] = &buffer;
    for (const WeightSpec& weight : plan.weights) weights_[weight.name] = &weight;
  }

  BoundStep bind(const StepSpec& step) {
    step_ = &step;
    const Kernel* kernel = runnable_kernel(step.kernel);
    check(kernel->op() == step.op, "kernel " + step.kernel + " does not compute op " + step.op);
    kernel_ = kernel;
    const Op* const op = find_op(*kernel);
    check(op != nullptr, "CPU targets cannot compute op " + step.op);
    BoundStep bound{step.name, kernel, {}, {}, {}, false, {}, {}, {}};
    op->bind(*this, bound);
    if (bound.args.type() != *op->args) throw std::logic_error(step.kernel + ": its op is bound to another struct");
    for (const std::string& input : step.inputs)
      if (const auto found = buffers_.find(input); found != buffers_.end()) bound.inputs.push_back(found->second);
    for (const std::string& output : step.outputs)
      if (!output.empty()) bound.outputs.push_back(find_buffer(output));
    return bound;
  }

  const StepSpec& spec() const { return *step_; }
  const Kernel& kernel() const { return *kernel_; }
  const PlanSpec& plan() const { return plan_; }

  void check(bool holds, const std::string& otherwise) const {
    if (!holds) throw std::invalid_argument("kernel call " + step_->name + ": " + otherwise);
  }

  void check_multiple(const std::string& name, int64_t value, const std::string& of, int64_t divisor) const {
    check(value % divisor == 0, name + " is " + std::to_string(value) + ", expected a multiple of " + of +
                                    ", which is " + std::to_string(divisor));
  }

  const Kernel* runnable_kernel(const std::string& name) const {
    const Kernel* kernel = find_kernel(name);
    check(kernel != nullptr, "this build of ingot has no kernel " + name);
    check(isa_includes(memory_.isa, kernel->isa()),
          "kernel " + name + " needs " + std::string(kernel->isa()) + ", this machine offers " + memory_.isa);
    return kernel;
  }

  void check_count(const char* verb, size_t found, size_t wanted, const char* of) const {
    check(found == wanted,
          std::string(verb) + " " + std::to_string(wanted) + " " + of + ", has " + std::to_string(found));
  }

  void check_form(size_t inputs, size_t outputs, size_t attrs) const {
    check_count("takes", step_->inputs.size(), inputs, "inputs");
    check_count("gives", step_->outputs.size(), outputs, "outputs");
    check_count("takes", step_->attrs.size(), attrs, "attributes");
  }

  // An input that kernels of other targets take.
  void check_absent(size_t index, const std::string& name) const {
    check(step_->inputs[index].empty(), "CPU kernels take no input " + name + ", got " + step_->inputs[index]);
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

  // The ranks that compute the plan, and where they meet in this step, to which each brings rows of at most `cols`.
  RankGroup* group() const;
  const Meeting& meeting(const BufferSpec* x, int64_t cols) const;
  // Whether it lies where the ranks meet, in this step: what a collective takes, or what it has left there.
  bool in_slot(const BufferSpec* buffer) const;
  const float* to_be_copied(const BufferSpec* x) const { return in_slot(x) ? nullptr : at(x); }

  // The stages that compute the model together, of which the step names this one; and what the step passes on.
  RankGroup* stages() const;
  const Message& message() const;

  const BufferSpec* optional_buffer(const std::string& name, int64_t cols) const {
    return name.empty() ? nullptr : buffer(name, cols);
  }

  // The step's input `index`, which must be this one of the plan's; null for block tables, which lie elsewhere in every
  // step.
  const int32_t* given(size_t index, const std::string& name) const;

  float* at(const BufferSpec* buffer) const {
    return buffer == nullptr ? nullptr : reinterpret_cast<float*>(memory_.at(step_->name, *buffer));
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
  const WeightSpec* row_weight(const std::string& name, std::string_view dtype, std::vector<int64_t> shape) const {
    const WeightSpec* weight = find_weight(name);
    const std::string layout = row_layout_of(dtype);
    check(weight->layout == layout && weight->dtype == dtype,
          "weight " + name + " must be " + std::string(dtype) + " of layout " + layout);
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
    Activation found;
    check(find_activation(word, &found), "there is no activation " + word);
    return found;
  }

  // The packed weight of a product, [N, K] or [experts, N, K], in the types that the kernel and the step name.
  const WeightSpec* product_weight(const std::string& name, size_t dimensions, bool gated) const;
  // The weight's pieces, which must hold panels 0 .. num_panels-1 (of every expert) in order and lie inside the weights
  // section. panel_bytes: of all experts together.
  std::vector<WeightSlice> panels(const WeightSpec* weight, int64_t num_panels, int64_t panel_bytes, bool gated) const;
  int64_t attr_group(std::string_view dtype) const;
  // Of a product, which has one more attribute where a build has timed its ways: a digit for each class of rows.
  void bind_form(BoundStep& bound, size_t inputs, size_t attrs, const Kernel& timed) const;
  // The step's layer of the KV cache; attributes must agree with the layer's cache group. latent: values are the first
  // numbers of keys there.
  PagedKv layer_kv(bool latent = false) const;
  // The step's layer of a cache group with states, which must have so many numbers there.
  StateSlots layer_state(int64_t numbers) const;
  const CacheSpec& cache(const PagedKv& kv) const { return plan_.caches[static_cast<size_t>(kv.group)]; }

 private:
  const PlanSpec& plan_;
  const PlanMemory& memory_;
  const Batch& batch_;
  std::vector<CacheSizes> caches_;
  std::unordered_map<std::string, const BufferSpec*> buffers_;
  std::unordered_map<std::string, const WeightSpec*> weights_;
  const StepSpec* step_ = nullptr;
  const Kernel* kernel_ = nullptr;
};

}  // namespace ingot

// Last line of a binding's file: the op's name, its kernels' struct, its function, then what else Op says.
#define INGOT_OP(op, Args, function, ...)                                                                     \
  namespace {                                                                                                 \
  const ::ingot::OpEntry INGOT_JOIN(registered_, __COUNTER__)({.name = op,                                    \
                                                               .args = &typeid(::ingot::Args),                \
                                                               .bind = function __VA_OPT__(, ) __VA_ARGS__}); \
  }
