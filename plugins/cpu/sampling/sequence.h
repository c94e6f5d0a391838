// What a session holds of one sequence: its rules and tokens. Every draw follows from them, and so does its end. The
// specification is src/ingot/plugins/sequences.py.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "sampling/sample_args.h"

namespace ingot {

using Words = std::vector<std::vector<int32_t>>;

// Grammar.native of src/ingot/step_io.py, its fields in order: the state of a grammar, which its owner keeps until the
// sequence has ended, and functions that move it. Those that return an int32_t return 0, or -1 where they fail.
struct NativeGrammar {
  uintptr_t state, reset, consume, fill_mask, is_stopped, rollback;
  int64_t mask_words;  // a bit per token of the tokenizer; further tokens of the model are never drawn
};

// SequenceRules of src/ingot/step_io.py, its fields in order.
struct SequenceRules {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  uint64_t seed;
  double repetition_penalty, frequency_penalty, presence_penalty;
  std::vector<std::tuple<int32_t, double>> logit_bias;
  Words bad_words, stop_words;
  std::vector<int32_t> end_ids;
  int64_t min_tokens, max_tokens;
  bool log_prob;
  int64_t top;  // -1: neither most likely tokens nor ranks
  std::vector<int32_t> reasoning_end;
  int32_t reasoning_begin;   // -1: it reasons from the start
  int64_t reasoning_budget;  // -1: as many as it takes
  std::optional<NativeGrammar> grammar;
};

enum class Ending : int32_t { kNone, kStop, kLength, kFailed };

class Sequence {
 public:
  // Throws std::invalid_argument in words.
  Sequence(SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt, int64_t vocab);

  int32_t last() const { return tokens_[tokens_.size() - 1 - num_drafts_]; }
  Ending ending() const { return ending_; }
  // Whether the best tokens of its rows are all that is ever wanted.
  bool only_best() const { return plain_ && draw_.temperature == 0 && !rules_.log_prob; }
  bool wants_log_prob() const { return rules_.log_prob; }
  bool wants_rank() const { return rules_.top >= 0; }

  // Adds the draws to come, of no row yet: the next one, then one behind each draft, as if these had been drawn. What
  // they point to stays until `drop_drafts`. Throws std::invalid_argument in words.
  void next(std::span<const int32_t> drafts, std::vector<Draw>& draws);
  void drop_drafts();
  // Adds what was drawn, where there are no drafts, and sees whether the sequence ends with it.
  void append(int32_t token, float log_prob);
  // What may come next, and tells the grammar what came, see Draw. Other sequences may do so at the same time.
  const uint32_t* allowed();
  void drawn(int32_t token);

 private:
  // What is added to the logits of a draw: to those of `ids`.
  struct Biases {
    std::vector<int32_t> ids;
    std::vector<float> values;

    void ban(int32_t token);
  };

  Draw next_draw(Biases& biases);
  // What the grammar allows in each of some draws: those behind the drafts follow tokens that it has not taken yet.
  void allow_drafts(std::span<const int32_t> drafts, std::span<Draw> draws);
  void fill_mask(std::vector<uint32_t>& mask);
  bool guided() const { return rules_.grammar.has_value() || !rules_.reasoning_end.empty(); }
  bool over_budget() const;
  // Whether the token to come tells if the sequence reasons.
  bool may_begin_to_reason() const {
    return !rules_.reasoning_end.empty() && rules_.reasoning_begin >= 0 && num_generated() == 0;
  }
  void begin_grammar();
  // Tells the grammar; whether it allows no further token.
  bool grammar_stops(int32_t token);
  int64_t num_generated() const { return static_cast<int64_t>(tokens_.size()) - num_prompt_; }
  bool generated_end_with(std::span<const int32_t> word) const;
  bool stops() const;

  SequenceRules rules_;
  std::vector<int32_t> tokens_;  // drafts behind the known ones
  size_t num_drafts_ = 0;
  int64_t num_prompt_;
  bool penalises_, plain_;
  Ending ending_ = Ending::kNone;
  Draw draw_;                   // what is the same in all draws
  std::vector<Biases> biases_;  // of each draw to come: the lasting ones, then what is banned in it alone
  size_t num_lasting_ = 0;
  bool reasons_ = false;                      // the end of the reasoning has not come yet: then the grammar waits
  bool grammar_ends_ = false;                 // it allows nothing behind what was drawn last
  bool tells_late_ = false;                   // the grammar hears what was drawn from `append`, not from the kernel
  std::vector<uint32_t> mask_;                // a bit per token
  std::vector<std::vector<uint32_t>> masks_;  // of the draws to come, where there are drafts
};

}  // namespace ingot
