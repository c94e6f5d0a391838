// The draws at the end of a step: checked and copied, so that nobody can change them while kernels read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ingot/kernel.h"
#include "sampling/sample_args.h"

namespace ingot {

// The arrays of DrawRules, ProbRows and SampleRows in src/ingot/step_io.py.
struct RulesView {
  std::span<const float> min_p, repetition_penalty, frequency_penalty, presence_penalty;
  std::span<const int32_t> history_starts, history, num_prompt, bias_starts, bias_ids;
  std::span<const float> bias;
};

struct ProbsView {
  std::span<const int32_t> given, top_starts;
};

struct DrawView {
  std::span<const int32_t> row;
  std::span<const float> temperature;
  std::span<const int32_t> top_k;
  std::span<const float> top_p;
  std::span<const uint64_t> seed, counter;
  std::optional<RulesView> rules;
  std::optional<ProbsView> probs;
  std::optional<std::span<const bool>> log_probs;  // of which drawn tokens they are wanted; of all unless given
};

struct DrawResult {
  std::vector<int32_t> ids;
  std::vector<float> log_probs;
  std::vector<int32_t> ranks, top_ids;  // empty where nobody wants them
  std::vector<float> top_log_probs;
};

// Throws std::invalid_argument unless `starts` says where each of `count` parts begins, the last of which ends at
// `end`.
void require_starts(const char* what, std::span<const int32_t> starts, size_t count, size_t end);

// What stands for a log probability that nobody wants and a session need not work out.
constexpr float kNoLogProb = 1.0f;

class Draws {
 public:
  // Throws std::invalid_argument in words. rows, vocab: of the logits to draw from.
  void assign(const DrawView& view, int64_t rows, int64_t vocab);

  int64_t count() const { return static_cast<int64_t>(row_.size()); }
  // Whether the best token of each row is all that is wanted.
  bool only_best() const;
  // Leaves out the log probabilities that nobody wants.
  void hide_log_probs(DrawResult& result) const;

  // Arguments of the sample kernel for these draws, its results in `result`. args.logits and args.vocab stay.
  void bind(SampleArgs& args, DrawResult& result) const;

 private:
  std::vector<int32_t> row_, top_k_;
  std::vector<float> temperature_, top_p_;
  std::vector<uint64_t> seed_, counter_;
  std::vector<uint8_t> hidden_;  // [draws] or empty: whose log probabilities nobody wants
  bool has_rules_ = false, has_probs_ = false;
  std::vector<float> min_p_, repetition_penalty_, frequency_penalty_, presence_penalty_, bias_;
  std::vector<int32_t> history_starts_, history_, num_prompt_, bias_starts_, bias_ids_, given_, top_starts_;
};

}  // namespace ingot
