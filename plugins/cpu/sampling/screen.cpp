#include "sampling/screen.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "matmul/matmul_args.h"
#include "threads/threads.h"

namespace ingot {
namespace {

static_assert(ThreadPool::kMaxThreads <= kScreenThreads);

void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// Of a bound step: a product of rows in int8 and nothing else, to the logits.
bool is_plain_product(const PlanSpec& plan, const StepSpec& step) {
  return step.op == "matmul" && step.inputs[2].empty() && step.inputs[3].empty() && step.outputs[0] == plan.logits &&
         step.attrs.at("activations") == AttrSpec("int8") && step.attrs.at("activation") == AttrSpec("none") &&
         step.attrs.at("gated") == AttrSpec(int64_t{0});
}

}  // namespace

Screen::Screen(const PlanSpec& plan, const PlanMemory& memory, const Batch& batch)
    : ids_(kScreenRows), candidates_(kScreenRows) {
  require(std::ranges::none_of(plan.steps, [](const StepSpec& step) { return step.op == "screen"; }),
          "the choice of a token is no step of its own");
  if (plan.screen.empty()) return;
  steps_ = bind_steps(plan, plan.screen, memory, batch);
  require(!plan.steps.empty() && steps_.size() == 2, "a screen is two steps beside others");
  const StepSpec &full = plan.steps.back(), &product = plan.screen[0], &choice = plan.screen[1];
  require(is_plain_product(plan, full) && is_plain_product(plan, product) && choice.op == "screen",
          "a screen is a product of int8 rows and a choice, and takes the place of such a product");
  require(product.inputs[0] == full.inputs[0] && choice.inputs[0] == full.inputs[0] &&
              choice.inputs[1] == plan.logits && choice.inputs[2] == product.inputs[1],
          "a screen reads the rows of the last step and its own codes");
  auto& args = *steps_[1].args.as<ScreenArgs>();
  args.ids = ids_.data();
  args.candidates = candidates_.data();
}

void Screen::set_counts(const Batch& batch) {
  rows_ = static_cast<size_t>(batch.rows);
  for (BoundStep& step : steps_) step.set_counts(batch);
}

size_t Screen::scratch_bytes() const {
  size_t bytes = 0;
  for (BoundStep step : steps_) {
    if (auto* matmul = step.args.as<MatmulArgs>()) matmul->rows = kScreenRows;
    if (auto* screen = step.args.as<ScreenArgs>()) screen->rows = kScreenRows;
    if (step.kernel->scratch != nullptr) bytes = std::max(bytes, step.kernel->scratch(step.args.data()));
  }
  return bytes;
}

bool Screen::decided() const {
  return std::all_of(ids_.begin(), ids_.begin() + static_cast<int64_t>(rows_), [](int32_t id) { return id >= 0; });
}

void Screen::count() {
  ++counts_.steps;
  if (!decided()) {
    ++counts_.undecided;
    return;
  }
  counts_.rows += static_cast<int64_t>(rows_);
  counts_.candidates +=
      std::accumulate(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(rows_), int64_t{0});
}

}  // namespace ingot
