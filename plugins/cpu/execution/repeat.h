// Steps of decoding sequences that follow each other: what bears on their draws from one to the next, and when to end.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "execution/batch.h"
#include "sampling/draws.h"

namespace ingot {

// Course, RepeatProbs and Repeat of src/ingot/step_io.py.
struct CourseView {
  std::span<const int32_t> num_lasting, min_steps, tails, tail_starts, bad_words, bad_word_starts, stop_words,
      stop_word_starts;
};

struct RepeatProbsView {
  std::span<int32_t> ranks, top_ids;
  std::span<float> top_log_probs;
};

struct RepeatView {
  double seconds;
  std::span<const int32_t> end_starts, end_ids;
  std::optional<CourseView> course;
  const int32_t* stop;  // other threads write it
  int64_t steps;
  std::span<int32_t> ids;  // [steps, sequences], as log_probs
  std::span<float> log_probs;
  std::optional<RepeatProbsView> probs;
  int32_t* done;  // other threads read it
};

// The draws of one step after another. The views must outlive it.
class RepeatedDraws {
 public:
  // Throws std::invalid_argument in words.
  RepeatedDraws(const BatchView& batch, const DrawView& first, const RepeatView& repeat);

  // Of the step to come.
  const DrawView& view() const { return view_; }
  // Keeps what the step drew; whether a sequence ended with it: by its token or a word, or for want of a token or
  // number.
  bool take(const DrawResult& drawn);
  // To the next step.
  void advance();

 private:
  void lay_out_rules();
  void ban(int32_t token);
  bool ended(size_t s, int32_t token, float log_prob) const;

  const RulesView* first_rules_;  // null where no draw has any
  const RepeatView& repeat_;
  DrawView view_;
  int64_t steps_ = 0;               // taken
  std::span<const int32_t> drawn_;  // by the last of them
  std::vector<uint64_t> counter_;
  std::vector<std::vector<int32_t>> histories_;  // of the draws that have one
  std::vector<std::vector<int32_t>> tails_;      // generated tokens, the last of which begin words
  std::vector<int32_t> history_starts_, history_, bias_starts_, bias_ids_;
  std::vector<float> bias_;
};

}  // namespace ingot
