// The sequences of a session, and the draws at the end of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ingot/kernel.h"
#include "sampling/sample_args.h"
#include "sampling/sequence.h"

namespace ingot {

// KnownTokens of src/ingot/step_io.py.
struct KnownView {
  std::span<const int32_t> row, token, top;
};

// What a StepBatch of src/ingot/step_io.py says of its draws.
struct DrawsView {
  std::span<const int32_t> slots;  // [sequences]
  std::span<const int32_t> draws;  // indices into the rows of logits
  std::optional<KnownView> known;
};

// StepResult of src/ingot/step_io.py: a row of each array after the other for several steps.
struct DrawResult {
  int64_t steps = 0;
  std::vector<int32_t> ids, ends;
  std::vector<float> log_probs;
  bool ranked = false;  // else the following are empty
  std::vector<int32_t> token_ranks, top_ids;
  std::vector<float> top_log_probs;
};

// What stands for a log probability that nobody wants and a session need not work out.
constexpr float kNoLogProb = 1.0f;
constexpr int32_t kNotDrawn = -2;  // NOT_DRAWN of src/ingot/step_io.py

class Sampler {
 public:
  Sampler(int64_t slots, int64_t vocab);

  // These throw std::invalid_argument in words.
  void start(int64_t slot, SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt);
  void end(int64_t slot);
  int32_t last_token(int64_t slot) { return at(slot).last(); }
  // The draws of a step: from row rows[q] of `num_rows` for the sequence in slots[q], then of known tokens. drafts: of
  // each row, the token that the draw before it must give for this one to count; -1 where no draw of the sequence is
  // before it. Nothing: all draws are first ones.
  void lay_out(std::span<const int32_t> rows, std::span<const int32_t> slots, const std::optional<KnownView>& known,
               int64_t num_rows, std::span<const int32_t> drafts = {});
  // Draw q is from row q of these logits in place of the model's.
  void draw_from(const float* processed);

  int64_t count() const { return static_cast<int64_t>(draws_.size()); }
  // Draws that want no more than the best token of a row leave out its probability. Sets to 0 the rows of which no draw
  // wants more.
  void leave_best_only(std::span<int32_t> whole_rows);
  // Of the sample kernel. Its results go behind those of the steps that `result` has.
  SampleArgs arguments(const float* logits, DrawResult& result);
  // Moves the sequences on by what the kernel drew, as far as it counts; whether any has ended. hides: leave out the
  // log probabilities that nobody wants.
  bool record(DrawResult& result, bool hides);

 private:
  Sequence& at(int64_t slot);

  int64_t vocab_;
  std::vector<std::optional<Sequence>> sequences_;
  std::vector<Sequence*> drawing_;
  std::vector<int32_t> drafts_;
  std::vector<Draw> draws_;     // of these, then of known tokens
  std::vector<uint8_t> ranks_;  // [draws]: whether it wants a rank
};

}  // namespace ingot
