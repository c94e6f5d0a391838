#include "execution/binder.h"

#include <algorithm>

#include "ranks/slots.h"
#include "sampling/sample_args.h"

namespace ingot {
namespace {

constexpr int64_t kMaxInt8K = 131000;  // MAX_K of plugins/quantised.py

std::vector<Op>& table() {
  static std::vector<Op> ops;  // in a function: files register before any order of files is known
  return ops;
}

}  // namespace

OpEntry::OpEntry(Op op) { table().push_back(op); }

const Op* find_op(const Kernel& kernel) {
  for (const Op& op : table())
    if (op.name == kernel.op()) return &op;
  return find_elements_op(*kernel.args);
}

std::string registration_problem(const Kernel& kernel) {
  const std::string name = std::string("kernel ") + kernel.name;
  const Op* const op = find_op(kernel);
  if (op == nullptr)
    return *kernel.args == typeid(SampleArgs) ? "" : name + " computes an op that has no binding with its struct";
  return *kernel.args == *op->args ? "" : name + " takes another struct than its op";
}

void require_registrations() {
  for (const Kernel& kernel : kernel_table())
    if (const std::string problem = registration_problem(kernel); !problem.empty()) throw std::logic_error(problem);
}

bool norms_rows(const Kernel& kernel) {
  const Op* const op = find_op(kernel);
  return op != nullptr && op->norms_rows && kernel.scratch != nullptr;
}

int32_t tactics_of(const Kernel& kernel) {
  const Op* const op = find_op(kernel);
  return op == nullptr || op->tactics == nullptr ? 1 : op->tactics(kernel);
}

const WeightSpec* Binder::product_weight(const std::string& name, size_t dimensions, bool gated) const {
  const WeightSpec* weight = find_weight(name);
  const std::string& dtype = weight->dtype;
  const std::string rounded = attr_word("activations"), taken(kernel_->dtype());
  check(taken == dtype + (rounded == "int8" ? "a8" : ""), std::string("kernel ") + kernel_->name + " does not take " +
                                                              dtype + " weights with " + rounded + " activations");
  check(rounded == kernel_->activations(),
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

std::vector<WeightSlice> Binder::panels(const WeightSpec* weight, int64_t num_panels, int64_t panel_bytes,
                                        bool gated) const {
  std::vector<WeightSlice> pieces;
  int64_t next = 0;
  for (const WeightSliceSpec& piece : weight->pieces) {
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

int64_t Binder::attr_group(std::string_view dtype) const {
  const int64_t group = attr_int("group", 0, 128);
  check(comes_in_groups(dtype, group),
        "a " + std::string(dtype) + " weight does not come in groups of " + std::to_string(group));
  return group;
}

void Binder::bind_form(BoundStep& bound, size_t inputs, size_t attrs, const Kernel& timed) const {
  const bool tuned = step_->attrs.contains("tactics");
  check_form(inputs, 1, attrs + tuned);
  if (!tuned) return;
  const std::string word = attr_word("tactics"), digits("0123456789", static_cast<size_t>(tactics_of(timed)));
  check(word.size() == bound.tactics.size() && word.find_first_not_of(digits) == std::string::npos,
        "attribute tactics must be four digits, each below " + std::to_string(digits.size()) + ", got " + word);
  for (size_t i = 0; i < word.size(); ++i) bound.tactics[i] = word[i] - '0';
}

const int32_t* Binder::given(size_t index, const std::string& name) const {
  const std::string& got = step_->inputs[index];
  check(got == name, "its input " + std::to_string(index) + " must be " + name + ", got \"" + got + "\"");
  check(std::ranges::any_of(plan_.inputs, [&](const InputSpec& each) { return each.name == name; }),
        "the plan lists no input " + name);
  if (name == "input_ids") return batch_.ids.data();
  if (name == "positions") return batch_.positions.data();
  if (name == "token_sequences") return batch_.sequence_of.data();
  if (name == "query_starts") return batch_.query_starts.data();
  if (name == "past_lengths") return batch_.past_lengths.data();
  if (name == "whole_rows") return batch_.whole_rows.data();
  return name == "logit_rows" ? batch_.logit_rows.data() : nullptr;
}

PagedKv Binder::layer_kv(bool latent) const {
  const int64_t layer = attr_int("layer", 0, 65534);
  check(layer < plan_.num_layers(), "no cache group has layer " + std::to_string(layer));
  const LayerPlace at = find_layer(plan_.caches, layer);
  const auto group = static_cast<size_t>(at.group);
  const CacheSpec& kv = plan_.caches[group];
  const CacheSizes& sizes = caches_[group];
  check(kv.state.empty(), "layer " + std::to_string(layer) + " keeps a state, no keys and values");
  check((kv.latent != 0) == latent, "layer " + std::to_string(layer) + " keeps its values in another way");
  check(kernel_->dtype() == kv.dtype,
        "the KV cache is " + kv.dtype + ", kernel " + kernel_->name + " takes " + std::string(kernel_->dtype()));
  attr_int("kv_heads", kv.kv_heads, kv.kv_heads);
  attr_int("head_dim", kv.head_dim, kv.head_dim);
  return PagedKv{.keys = memory_.kv[group] + sizes.offset(at.place, false),
                 .values = memory_.kv[group] + sizes.offset(at.place, true),
                 .block_bytes = sizes.block,
                 .kv_heads = kv.kv_heads,
                 .head_dim = kv.head_dim,
                 .value_dim = kv.latent == 0 ? kv.head_dim : kv.latent,
                 .padded_dim = sizes.padded_dim,
                 .block_size = kv.tokens_per_block,
                 .group = at.group,
                 .block_tables = nullptr,
                 .table_width = 0,
                 .query_starts = nullptr,
                 .past_lengths = nullptr,
                 .positions = nullptr,
                 .sequence_of = nullptr,
                 .sequences = 0,
                 .tokens = 0};
}

StateSlots Binder::layer_state(int64_t numbers) const {
  const int64_t layer = attr_int("layer", 0, 65534);
  check(layer < plan_.num_layers(), "no cache group has layer " + std::to_string(layer));
  const LayerPlace at = find_layer(plan_.caches, layer);
  const auto group = static_cast<size_t>(at.group);
  const CacheSpec& cache = plan_.caches[group];
  check(!cache.state.empty() && cache.state[static_cast<size_t>(at.place)] == numbers,
        "layer " + std::to_string(layer) + " must keep a state of " + std::to_string(numbers) + " numbers");
  return StateSlots{.numbers = memory_.kv[group] + caches_[group].offset(at.place, false),
                    .slot_bytes = caches_[group].block,
                    .block_size = cache.tokens_per_block,
                    .group = at.group,
                    .block_tables = nullptr,
                    .table_width = 0,
                    .query_starts = nullptr,
                    .past_lengths = nullptr,
                    .sequences = 0,
                    .tokens = 0};
}

RankGroup* Binder::group() const {
  const int64_t ranks = attr_int("ranks", 2, RankGroup::kMostRanks);
  check(memory_.group != nullptr && memory_.group->places() == ranks,
        std::to_string(ranks) + " ranks compute it together, and " +
            std::to_string(memory_.group == nullptr ? 1 : memory_.group->places()) + " are here");
  return memory_.group;
}

RankGroup* Binder::stages() const {
  const int64_t stages = attr_int("stages", 2, RankGroup::kMostRanks);
  const int64_t stage = attr_int("stage", 0, stages - 1);
  RankGroup* const group = memory_.group;
  check(group != nullptr && group->stages() == stages && group->stage() == stage,
        "it is of pipeline stage " + std::to_string(stage) + " of " + std::to_string(stages) + ", this process is of " +
            (group == nullptr ? "0 of 1" : std::to_string(group->stage()) + " of " + std::to_string(group->stages())));
  return group;
}

const Message& Binder::message() const {
  stages();
  const Message& found = memory_.messages.at(step_->name);
  check(attr_int("message", 0, kMaxCount) == found.index,
        "message " + std::to_string(found.index) + " has another number");
  return found;
}

const Meeting& Binder::meeting(const BufferSpec* x, int64_t cols) const {
  const int64_t bytes = product(product(buffer_rows(plan_, *x), cols), sizeof(float));
  check(bytes <= static_cast<int64_t>(memory_.group->slot_bytes()), "the ranks' slots are too small for " + x->name);
  return memory_.meetings.at(step_->name);
}

void BoundStep::set_counts(const Batch& batch) {
  const int64_t rows = counts_logits ? batch.rows : batch.tokens;
  args.set_counts(batch, rows, tactics[rows <= 1 ? 0 : rows <= 8 ? 1 : rows <= 32 ? 2 : 3]);
}

bool Binder::in_slot(const BufferSpec* buffer) const { return memory_.in_slots.contains({step_->name, buffer->name}); }

namespace {

bool has(const std::vector<std::string>& names, const std::string& name) { return std::ranges::count(names, name) > 0; }

// The first of the steps that make what the collective at `last` takes, one in the place of another. `last` itself
// where they cannot write it into a slot: it is read elsewhere, or begun before the collective at `before` has freed
// the slot.
size_t first_maker(const std::vector<StepSpec>& steps, const std::string& x, size_t last, size_t before) {
  for (size_t after = last + 1; after < steps.size() && !has(steps[after - 1].outputs, x); ++after)
    if (has(steps[after].inputs, x)) return last;
  for (size_t i = last; i-- > before + 1;) {
    const bool writes = has(steps[i].outputs, x), reads = has(steps[i].inputs, x);
    if (writes && !reads) return i;
  }
  return last;
}

// The last of the steps that read the sums y of the collective at `at`. `at` itself where they cannot lie in a slot: a
// step writes over them in place, or reads them at `end` or later.
size_t last_reader(const PlanSpec& plan, const std::string& y, size_t at, size_t end) {
  size_t last = at;
  for (size_t i = at + 1; i < plan.steps.size(); ++i) {
    const bool reads = has(plan.steps[i].inputs, y), writes = has(plan.steps[i].outputs, y);
    if (reads && (writes || i >= end)) return at;
    if (reads) last = i;
    if (writes) return last;
  }
  return y == plan.logits ? at : last;
}

// Those that a stage gets are numbered apart from those that it passes on, and lie as the stage before has them.
void place_message(const PlanSpec& plan, const StepSpec& step, PlanMemory& memory) {
  const bool sends = !step.inputs.empty();
  const std::string& name = sends ? step.inputs[0] : step.outputs.empty() ? step.name : step.outputs[0];
  const auto buffer = std::ranges::find(plan.buffers, name, &BufferSpec::name);
  auto& [count, end] = sends ? memory.sends : memory.receives;
  memory.messages[step.name] = {.index = count++, .offset = end, .name = step.name.c_str()};
  if (buffer == plan.buffers.end()) return;  // its binding says so
  end += static_cast<size_t>(round_up(product(buffer_rows(plan, *buffer), buffer->cols, sizeof(float)), kAlignment));
  if (end > memory.group->message_bytes())
    throw std::invalid_argument("step " + step.name + ": the stages' messages are too small for " + name);
}

}  // namespace

void place_meetings(const PlanSpec& plan, PlanMemory& memory) {
  if (memory.group == nullptr) return;
  std::vector<size_t> collectives;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Kernel* const kernel = find_kernel(plan.steps[i].kernel);
    const Op* const op = kernel == nullptr ? nullptr : find_op(*kernel);
    if (op != nullptr && op->passes_rows) place_message(plan, plan.steps[i], memory);
    if (op != nullptr && op->meets_ranks && !plan.steps[i].inputs.empty()) collectives.push_back(i);
  }
  if (std::ssize(collectives) >= RankGroup::kMostMeetings / 2)
    throw std::invalid_argument("the plan has " + std::to_string(collectives.size()) + " collectives, at most " +
                                std::to_string(RankGroup::kMostMeetings / 2 - 1) + " are possible");
  Slots slots;
  for (size_t k = 0; k < collectives.size(); ++k) {
    const size_t at = collectives[k];
    const std::optional<size_t> before = k == 0 ? std::nullopt : std::optional(collectives[k - 1]);
    const StepSpec& step = plan.steps[at];
    const bool leaves = find_op(*find_kernel(step.kernel))->leaves_sums && !step.outputs.empty();
    const std::string y = leaves && memory.group->common(0) != nullptr ? step.outputs[0] : "";
    const size_t end = k + 2 < collectives.size() ? collectives[k + 2] : plan.steps.size();
    const size_t last = y.empty() ? at : last_reader(plan, y, at, end);
    const int slot = slots.take(before, last);
    const auto number = static_cast<int64_t>(2 * k + 1);  // it may take two meetings
    memory.meetings[step.name] = {.number = number, .slot = slot, .name = step.name.c_str()};
    if (const size_t first = first_maker(plan.steps, step.inputs[0], at, before.value_or(SIZE_MAX)); first < at)
      for (size_t maker = first; maker <= at; ++maker)
        memory.in_slots[{plan.steps[maker].name, step.inputs[0]}] = memory.group->own(slot);
    for (size_t reader = at; last > at && reader <= last; ++reader)
      memory.in_slots[{plan.steps[reader].name, y}] = memory.group->common(slot);
  }
}

std::vector<BoundStep> bind_steps(const PlanSpec& plan, const std::vector<StepSpec>& steps, const PlanMemory& memory,
                                  const Batch& batch) {
  for (const WeightSpec& weight : plan.weights) check_weight(weight, memory.weight_bytes);
  Binder binder(plan, memory, batch);
  std::vector<BoundStep> bound;
  bound.reserve(steps.size());
  for (const StepSpec& step : steps) bound.push_back(binder.bind(step));
  return bound;
}

}  // namespace ingot
