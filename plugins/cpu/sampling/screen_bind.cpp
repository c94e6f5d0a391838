#include "execution/binder.h"
#include "sampling/screen_args.h"

namespace ingot {
namespace {

constexpr std::string_view kCodes = kW4.dtype;  // see plugins/ops/screen.py

void bind_screen(const Binder& step, BoundStep& bound) {
  step.check_form(5, 0, 1);
  const BufferSpec* x = step.find_buffer(step.spec().inputs[0]);
  const int64_t k = x->cols, vocab = step.plan().limits.vocab_size, group = step.attr_group(kCodes);
  const WeightSpec* codes = step.find_weight(step.spec().inputs[2]);
  const bool fits = codes->layout == panel_layout_of(kCodes, group) && codes->shape == std::vector{vocab, k};
  step.check(fits, "weight " + codes->name + " must hold a row of " + std::string(kCodes) + " codes for each token");
  const WeightSpec* table = step.row_weight(step.spec().inputs[4], kTableFormat.dtype, {-1, k});
  step.check(table->shape[0] >= vocab, "the table has fewer rows than the vocabulary");
  const auto* dither = reinterpret_cast<const float*>(step.at(step.row_weight(step.spec().inputs[3], "f32", {k})));
  const int64_t panel_bytes = panel_bytes_of(kCodes, k, group);
  for (const WeightSlice& piece : step.panels(codes, round_up(vocab, kPanel) / kPanel, panel_bytes, false))
    for (const std::byte* at = piece.data; at < piece.data + (piece.end - piece.begin) * panel_bytes; at += panel_bytes)
      bound.scales.insert(bound.scales.end(), reinterpret_cast<const float*>(at),
                          reinterpret_cast<const float*>(at) + kPanel);
  bound.counts_logits = true;
  bound.args = ScreenArgs{.x = step.at(x),
                          .centres = step.at(step.buffer(step.spec().inputs[1], vocab)),
                          .scales = bound.scales.data(),
                          .dither = dither,
                          .table = step.at(table),
                          .rows = 0,
                          .vocab = vocab,
                          .k = k,
                          .row_bytes = row_bytes_of(kTableFormat.dtype, k),
                          .ids = nullptr,
                          .candidates = nullptr};
}

}  // namespace
}  // namespace ingot

INGOT_OP("screen", ingot::bind_screen)
