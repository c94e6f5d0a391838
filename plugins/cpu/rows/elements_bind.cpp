#include <map>

#include "execution/binder.h"
#include "rows/elements_args.h"

namespace ingot {

void bind_elements(const Binder& step, BoundStep& bound) {
  const StepSpec& spec = step.spec();
  const size_t inputs = spec.inputs.size(), numbers = spec.attrs.size();
  step.check_form(inputs, 1, numbers);
  step.check(inputs >= 1 && inputs <= ElementsArgs::kMostInputs && numbers <= ElementsArgs::kMostNumbers,
             "takes up to " + std::to_string(ElementsArgs::kMostInputs) + " inputs and " +
                 std::to_string(ElementsArgs::kMostNumbers) + " attributes");
  const BufferSpec* y = step.find_buffer(spec.outputs[0]);
  ElementsArgs args{.inputs = {}, .y = step.at(y), .rows = 0, .cols = y->cols, .numbers = {}};
  for (size_t i = 0; i < inputs; ++i) {
    const BufferSpec* input = step.buffer(spec.inputs[i], y->cols);
    step.same_rows(input, y);
    step.apart(y, input, true);
    args.inputs[i] = step.at(input);
  }
  size_t next = 0;
  for (const auto& [key, value] : std::map(spec.attrs.begin(), spec.attrs.end()))
    args.numbers[next++] = step.attr_float(key.c_str());
  bound.counts_logits = y->rows == "logits";
  bound.args = args;
}

}  // namespace ingot
