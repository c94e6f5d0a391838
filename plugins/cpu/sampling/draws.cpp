#include "sampling/draws.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ingot {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

void require_within(const char* what, std::span<const int32_t> values, int64_t begin, int64_t end) {
  for (const int32_t value : values)
    require(value >= begin && value < end, std::string(what) + " is " + std::to_string(value) + ", expected " +
                                               std::to_string(begin) + " to " + std::to_string(end - 1));
}

void check_rules(const RulesView& rules, size_t count, int64_t vocab) {
  require(rules.min_p.size() == count && rules.repetition_penalty.size() == count &&
              rules.frequency_penalty.size() == count && rules.presence_penalty.size() == count &&
              rules.num_prompt.size() == count,
          "the arrays of rules must have equal lengths");
  require_starts("history_starts", rules.history_starts, count, rules.history.size());
  require_starts("bias_starts", rules.bias_starts, count, rules.bias_ids.size());
  require(rules.bias.size() == rules.bias_ids.size(), "bias_ids and bias must have equal lengths");
  require_within("a token of the history", rules.history, 0, vocab);
  require_within("a biased token", rules.bias_ids, 0, vocab);
  for (size_t q = 0; q < count; ++q) {
    require(rules.min_p[q] >= 0 && rules.min_p[q] <= 1, "min_p must be 0 to 1");
    require(std::isfinite(rules.repetition_penalty[q]) && rules.repetition_penalty[q] > 0,
            "repetition_penalty must be > 0");
    require(std::isfinite(rules.frequency_penalty[q]) && std::isfinite(rules.presence_penalty[q]),
            "penalties must be numbers");
    const int32_t length = rules.history_starts[q + 1] - rules.history_starts[q];
    require(rules.num_prompt[q] >= 0 && (length == 0 || rules.num_prompt[q] <= length),
            "num_prompt is beyond the history");
  }
  for (const float bias : rules.bias) require(bias < HUGE_VALF, "a bias must be a number or -inf");
}

template <typename T>
void copy(std::vector<T>& to, std::span<const T> from) {
  to.assign(from.begin(), from.end());
}

}  // namespace

void require_starts(const char* what, std::span<const int32_t> starts, size_t count, size_t end) {
  const std::string name(what);
  require(starts.size() == count + 1, name + " must have one entry per draw or sequence and one more");
  require(starts.front() == 0 && starts.back() == static_cast<int64_t>(end),
          name + " must begin at 0 and end at the number of entries");
  for (size_t q = 0; q < count; ++q) require(starts[q] <= starts[q + 1], name + " must not descend");
}

void Draws::assign(const DrawView& view, int64_t rows, int64_t vocab) {
  const size_t count = view.row.size();
  require(view.temperature.size() == count && view.top_k.size() == count && view.top_p.size() == count &&
              view.seed.size() == count && view.counter.size() == count,
          "the arrays of sample must have equal lengths");
  require_within("a sample row", view.row, 0, rows);
  for (size_t q = 0; q < count; ++q) {
    require(std::isfinite(view.temperature[q]) && view.temperature[q] >= 0, "temperature must be a number >= 0");
    require(view.top_k[q] >= 0, "top_k must be >= 0");
    require(view.top_p[q] > 0 && view.top_p[q] <= 1, "top_p must be > 0 and <= 1");
  }
  require(!view.log_probs || view.log_probs->size() == count, "log_probs must have one entry per draw");
  if (view.rules) check_rules(*view.rules, count, vocab);
  if (view.probs) {
    require(view.probs->given.size() == count, "given must have one entry per draw");
    require_within("a given token", view.probs->given, -1, vocab);
    require(!view.probs->top_starts.empty(), "top_starts must have one entry per draw and one more");
    require(view.probs->top_starts.back() >= 0, "top_starts must not descend");
    require_starts("top_starts", view.probs->top_starts, count, static_cast<size_t>(view.probs->top_starts.back()));
    for (size_t q = 0; q < count; ++q)
      require(view.probs->top_starts[q + 1] - view.probs->top_starts[q] <= vocab, "there are fewer tokens than wanted");
  }
  copy(row_, view.row);
  copy(temperature_, view.temperature);
  copy(top_k_, view.top_k);
  copy(top_p_, view.top_p);
  copy(seed_, view.seed);
  copy(counter_, view.counter);
  has_rules_ = view.rules.has_value();
  if (has_rules_) {
    copy(min_p_, view.rules->min_p);
    copy(repetition_penalty_, view.rules->repetition_penalty);
    copy(frequency_penalty_, view.rules->frequency_penalty);
    copy(presence_penalty_, view.rules->presence_penalty);
    copy(history_starts_, view.rules->history_starts);
    copy(history_, view.rules->history);
    copy(num_prompt_, view.rules->num_prompt);
    copy(bias_starts_, view.rules->bias_starts);
    copy(bias_ids_, view.rules->bias_ids);
    copy(bias_, view.rules->bias);
  }
  hidden_.clear();
  if (view.log_probs)
    for (const bool wanted : *view.log_probs) hidden_.push_back(!wanted);
  has_probs_ = view.probs.has_value();
  if (has_probs_) {
    copy(given_, view.probs->given);
    copy(top_starts_, view.probs->top_starts);
  }
}

bool Draws::only_best() const {
  return !has_rules_ && !has_probs_ && !hidden_.empty() &&
         std::ranges::all_of(hidden_, [](uint8_t each) { return each != 0; }) &&
         std::ranges::all_of(temperature_, [](float each) { return each == 0; });
}

void Draws::hide_log_probs(DrawResult& result) const {
  for (size_t q = 0; q < hidden_.size(); ++q)
    if (hidden_[q] && std::isfinite(result.log_probs[q])) result.log_probs[q] = kNoLogProb;
}

void Draws::bind(SampleArgs& args, DrawResult& result) const {
  const float* logits = args.logits;
  const int64_t vocab = args.vocab;
  const size_t n = row_.size(), top = has_probs_ ? static_cast<size_t>(top_starts_.back()) : 0;
  result.ids.assign(n, 0);
  result.log_probs.assign(n, 0);
  result.ranks.assign(has_probs_ ? n : 0, 0);
  result.top_ids.assign(top, 0);
  result.top_log_probs.assign(top, 0);
  args = {};
  args.logits = logits;
  args.vocab = vocab;
  args.draws = count();
  args.row = row_.data();
  args.temperature = temperature_.data();
  args.top_k = top_k_.data();
  args.top_p = top_p_.data();
  args.seed = seed_.data();
  args.counter = counter_.data();
  args.ids = result.ids.data();
  args.log_probs = result.log_probs.data();
  if (has_rules_) {
    args.min_p = min_p_.data();
    args.repetition_penalty = repetition_penalty_.data();
    args.frequency_penalty = frequency_penalty_.data();
    args.presence_penalty = presence_penalty_.data();
    args.history_starts = history_starts_.data();
    args.history = history_.data();
    args.num_prompt = num_prompt_.data();
    args.bias_starts = bias_starts_.data();
    args.bias_ids = bias_ids_.data();
    args.bias = bias_.data();
  }
  if (has_probs_) {
    args.given = given_.data();
    args.top_starts = top_starts_.data();
    args.ranks = result.ranks.data();
    args.top_ids = result.top_ids.data();
    args.top_log_probs = result.top_log_probs.data();
  }
}

}  // namespace ingot
