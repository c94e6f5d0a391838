#include "execution/repeat.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace ingot {
namespace {

using Words = std::span<const int32_t>;  // -1 behind each

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

std::span<const int32_t> part(std::span<const int32_t> all, std::span<const int32_t> starts, size_t s) {
  return all.subspan(starts[s], starts[s + 1] - starts[s]);
}

// Calls f(word) until it says true; whether it did.
template <typename F>
bool any_word(Words words, F f) {
  while (!words.empty()) {
    const size_t length = std::ranges::find(words, -1) - words.begin();
    if (f(words.first(length))) return true;
    words = words.subspan(length + 1);
  }
  return false;
}

bool ends_with(const std::vector<int32_t>& tokens, Words word) {
  return word.size() <= tokens.size() &&
         std::equal(word.begin(), word.end(), tokens.end() - static_cast<int64_t>(word.size()));
}

void require_words(const char* what, std::span<const int32_t> words, std::span<const int32_t> starts, size_t count,
                   size_t shortest) {
  require_starts(what, starts, count, words.size());
  for (size_t s = 0; s < count; ++s) {
    const Words own = part(words, starts, s);
    require(own.empty() || own.back() == -1, std::string(what) + " must have a -1 behind each word");
    require(!any_word(own, [&](Words word) { return word.size() < shortest; }),
            std::string(what) + " holds a word that is too short");
  }
}

void check_course(const CourseView& course, size_t count, const std::optional<RulesView>& rules) {
  require(course.num_lasting.size() == count && course.min_steps.size() == count,
          "num_lasting and min_steps must have one entry per sequence");
  require_starts("tail_starts", course.tail_starts, count, course.tails.size());
  require_words("bad_words", course.bad_words, course.bad_word_starts, count, 2);
  require_words("stop_words", course.stop_words, course.stop_word_starts, count, 1);
  for (size_t s = 0; s < count; ++s) {
    const int32_t biases = rules ? rules->bias_starts[s + 1] - rules->bias_starts[s] : 0;
    require(course.num_lasting[s] >= 0 && course.num_lasting[s] <= biases, "num_lasting is more than there are biases");
  }
  require(rules || (course.bad_words.empty() &&
                    std::ranges::all_of(course.min_steps, [](int32_t steps) { return steps <= 0; })),
          "bad words and min_steps need rules");
}

void check_probs(const RepeatView& repeat, const ProbsView& wanted, size_t count) {
  require(std::ranges::all_of(wanted.given, [](int32_t token) { return token < 0; }),
          "draws that follow each other are given no token");
  const auto steps = static_cast<size_t>(repeat.steps), top = static_cast<size_t>(wanted.top_starts.back());
  require(repeat.probs->ranks.size() == steps * count && repeat.probs->top_ids.size() == steps * top &&
              repeat.probs->top_log_probs.size() == steps * top,
          "ranks, top_ids and top_log_probs must have one entry per step and probability");
}

void check_repeat(const BatchView& batch, const DrawView& draws, const RepeatView& repeat) {
  const size_t count = batch.past_lengths.size();
  require(batch.ids.size() == count && batch.logit_rows.size() == count && draws.row.size() == count &&
              draws.counter.size() == count,
          "steps can follow each other where every sequence has one token, one row of logits and one draw");
  for (size_t s = 0; s < count; ++s)
    require(draws.row[s] == static_cast<int32_t>(s),
            "where steps follow each other, draw s must be that of sequence s");
  require(repeat.steps >= 1, "there must be at least one step");
  const size_t drawn = static_cast<size_t>(repeat.steps) * count;
  require(repeat.ids.size() == drawn && repeat.log_probs.size() == drawn,
          "ids and log_probs must have one entry per step and sequence");
  require_starts("end_starts", repeat.end_starts, count, repeat.end_ids.size());
  if (draws.rules) {
    require_starts("history_starts", draws.rules->history_starts, count, draws.rules->history.size());
    require_starts("bias_starts", draws.rules->bias_starts, count, draws.rules->bias_ids.size());
    require(draws.rules->bias.size() == draws.rules->bias_ids.size(), "bias_ids and bias must have equal lengths");
  }
  if (repeat.course) check_course(*repeat.course, count, draws.rules);
  require(draws.probs.has_value() == repeat.probs.has_value(),
          "probabilities must be wanted of the draws and of their repetition, or of neither");
  if (!draws.probs) return;
  require(draws.probs->given.size() == count, "given must have one entry per draw");
  require(!draws.probs->top_starts.empty() && draws.probs->top_starts.back() >= 0,
          "top_starts must have one entry per draw and one more");
  check_probs(repeat, *draws.probs, count);
}

}  // namespace

RepeatedDraws::RepeatedDraws(const BatchView& batch, const DrawView& first, const RepeatView& repeat)
    : first_rules_(first.rules ? &*first.rules : nullptr), repeat_(repeat), view_(first) {
  check_repeat(batch, first, repeat);
  counter_.assign(first.counter.begin(), first.counter.end());
  view_.counter = counter_;
  const size_t count = counter_.size();
  histories_.resize(count);
  tails_.resize(count);
  for (size_t s = 0; s < count; ++s) {
    if (first_rules_ != nullptr) {
      const auto own = part(first_rules_->history, first_rules_->history_starts, s);
      histories_[s].assign(own.begin(), own.end());
    }
    if (repeat.course) {
      const auto own = part(repeat.course->tails, repeat.course->tail_starts, s);
      tails_[s].assign(own.begin(), own.end());
    }
  }
}

bool RepeatedDraws::take(const DrawResult& drawn) {
  const auto place = [&](size_t each) { return static_cast<int64_t>(static_cast<size_t>(steps_) * each); };
  const size_t count = drawn.ids.size();
  std::ranges::copy(drawn.ids, repeat_.ids.begin() + place(count));
  std::ranges::copy(drawn.log_probs, repeat_.log_probs.begin() + place(count));
  if (repeat_.probs) {
    std::ranges::copy(drawn.ranks, repeat_.probs->ranks.begin() + place(count));
    std::ranges::copy(drawn.top_ids, repeat_.probs->top_ids.begin() + place(drawn.top_ids.size()));
    std::ranges::copy(drawn.top_log_probs, repeat_.probs->top_log_probs.begin() + place(drawn.top_ids.size()));
  }
  drawn_ = repeat_.ids.subspan(static_cast<size_t>(steps_) * count, count);
  ++steps_;
  bool any = false;
  for (size_t s = 0; s < count; ++s) {
    if (repeat_.course) tails_[s].push_back(drawn_[s]);
    any = any || ended(s, drawn_[s], drawn.log_probs[s]);
  }
  return any;
}

bool RepeatedDraws::ended(size_t s, int32_t token, float log_prob) const {
  if (token < 0 || !std::isfinite(log_prob)) return true;
  const auto ends = part(repeat_.end_ids, repeat_.end_starts, s);
  if (std::ranges::find(ends, token) != ends.end()) return true;
  if (!repeat_.course || steps_ < repeat_.course->min_steps[s]) return false;
  const Words words = part(repeat_.course->stop_words, repeat_.course->stop_word_starts, s);
  return any_word(words, [&](Words word) { return ends_with(tails_[s], word); });
}

void RepeatedDraws::advance() {
  for (uint64_t& each : counter_) ++each;
  if (first_rules_ == nullptr) return;
  for (size_t s = 0; s < histories_.size(); ++s)
    if (!histories_[s].empty()) histories_[s].push_back(drawn_[s]);
  lay_out_rules();
}

// Into the view, for the step to come.
void RepeatedDraws::lay_out_rules() {
  history_.clear();
  history_starts_.assign(1, 0);
  for (const std::vector<int32_t>& own : histories_) {
    history_.insert(history_.end(), own.begin(), own.end());
    history_starts_.push_back(static_cast<int32_t>(history_.size()));
  }
  view_.rules->history = history_;
  view_.rules->history_starts = history_starts_;
  if (!repeat_.course) return;
  bias_ids_.clear();
  bias_.clear();
  bias_starts_.assign(1, 0);
  for (size_t s = 0; s < histories_.size(); ++s) {
    const auto begin = first_rules_->bias_starts[s], end = begin + repeat_.course->num_lasting[s];
    bias_ids_.insert(bias_ids_.end(), first_rules_->bias_ids.begin() + begin, first_rules_->bias_ids.begin() + end);
    bias_.insert(bias_.end(), first_rules_->bias.begin() + begin, first_rules_->bias.begin() + end);
    any_word(part(repeat_.course->bad_words, repeat_.course->bad_word_starts, s), [&](Words word) {
      if (ends_with(tails_[s], word.first(word.size() - 1))) ban(word.back());
      return false;
    });
    if (steps_ < repeat_.course->min_steps[s])
      for (const int32_t token : part(repeat_.end_ids, repeat_.end_starts, s)) ban(token);
    bias_starts_.push_back(static_cast<int32_t>(bias_ids_.size()));
  }
  view_.rules->bias_ids = bias_ids_;
  view_.rules->bias = bias_;
  view_.rules->bias_starts = bias_starts_;
}

void RepeatedDraws::ban(int32_t token) {
  bias_ids_.push_back(token);
  bias_.push_back(-std::numeric_limits<float>::infinity());
}

}  // namespace ingot
