#include <iterator>

#include "execution/binder.h"
#include "rows/elements_args.h"

namespace ingot {
namespace {

template <int kInputs>
void bind_elements(const Binder& step, BoundStep& bound) {
  const std::vector<const char*>& numbers = step.kernel().numbers;
  step.check_form(kInputs, 1, numbers.size());
  const BufferSpec* y = step.find_buffer(step.spec().outputs[0]);
  ElementsArgs<kInputs> args{.inputs = {}, .y = step.at(y), .rows = 0, .cols = y->cols, .numbers = {}};
  for (size_t i = 0; i < numbers.size(); ++i) args.numbers[i] = step.attr_float(numbers[i]);
  for (size_t i = 0; i < std::size(args.inputs); ++i) {
    const BufferSpec* input = step.buffer(step.spec().inputs[i], y->cols);
    step.same_rows(input, y);
    step.apart(y, input, true);
    args.inputs[i] = step.at(input);
  }
  bound.counts_logits = y->rows == "logits";
  bound.args = args;
}

template <int kInputs>
const Op* op_of(const std::type_info& args) {
  static constexpr Op kOp{
      .name = "", .args = &typeid(ElementsArgs<kInputs>), .bind = bind_elements<kInputs>, .shares_by_rows = true};
  if (args == typeid(ElementsArgs<kInputs>)) return &kOp;
  if constexpr (kInputs < kMostElements) return op_of<kInputs + 1>(args);
  return nullptr;
}

}  // namespace

const Op* find_elements_op(const std::type_info& args) { return op_of<1>(args); }

}  // namespace ingot
