#include "sampling/sequence.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ingot {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

void require_token(const std::string& what, int64_t token, int64_t vocab) {
  require(token >= 0 && token < vocab, what + std::to_string(token) + ", expected 0 to " + std::to_string(vocab - 1));
}

template <typename Function>
Function call(uintptr_t address) {
  return std::bit_cast<Function>(address);
}

void* state(const NativeGrammar& grammar) { return std::bit_cast<void*>(grammar.state); }

bool finite(double value) { return std::isfinite(static_cast<float>(value)); }

void check_rules(const SequenceRules& rules, int64_t vocab) {
  require(finite(rules.temperature) && rules.temperature >= 0, "temperature must be a number >= 0");
  require(rules.top_k >= 0 && rules.top_k <= std::numeric_limits<int32_t>::max(), "top_k must be >= 0");
  require(rules.top_p > 0 && rules.top_p <= 1, "top_p must be > 0 and <= 1");
  require(rules.min_p >= 0 && rules.min_p <= 1, "min_p must be 0 to 1");
  require(finite(rules.repetition_penalty) && rules.repetition_penalty > 0, "repetition_penalty must be > 0");
  require(finite(rules.frequency_penalty) && finite(rules.presence_penalty), "penalties must be numbers");
  for (const auto& [token, bias] : rules.logit_bias) {
    require_token("logit_bias names token ", token, vocab);
    require(bias < HUGE_VALF,
            "a value of logit_bias is " + std::to_string(bias) + ", expected a finite number or -inf");
  }
  for (const auto& word : rules.bad_words) {
    require(!word.empty(), "a bad word has no token");
    require_token("a bad word ends with token ", word.back(), vocab);
  }
  for (const auto& word : rules.stop_words) require(!word.empty(), "a stop word has no token");
  for (const int32_t token : rules.end_ids)
    if (rules.min_tokens > 0) require_token("min_tokens bans end token ", token, vocab);
  for (const int32_t token : rules.reasoning_end) require_token("the reasoning ends with token ", token, vocab);
  if (rules.reasoning_begin >= 0) require_token("the reasoning begins with token ", rules.reasoning_begin, vocab);
  require(rules.top >= -1 && rules.top <= vocab,
          "logprobs asks for " + std::to_string(rules.top) + " tokens, expected -1 (all) to " + std::to_string(vocab));
}

}  // namespace

Sequence::Sequence(SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt, int64_t vocab)
    : rules_(std::move(rules)), tokens_(tokens.begin(), tokens.end()), num_prompt_(num_prompt) {
  check_rules(rules_, vocab);
  require(num_prompt >= 0 && num_prompt <= static_cast<int64_t>(tokens_.size()), "num_prompt is beyond the tokens");
  require(!tokens_.empty(), "a sequence has one token at least");
  for (const int32_t token : tokens_) require_token("the sequence has token ", token, vocab);
  require(num_generated() < rules_.max_tokens, "the sequence has as many tokens as it may have");
  draw_.temperature = static_cast<float>(rules_.temperature);
  draw_.top_k = static_cast<int32_t>(rules_.top_k);
  draw_.top_p = static_cast<float>(rules_.top_p);
  draw_.min_p = static_cast<float>(rules_.min_p);
  draw_.seed = rules_.seed;
  draw_.repetition_penalty = static_cast<float>(rules_.repetition_penalty);
  draw_.frequency_penalty = static_cast<float>(rules_.frequency_penalty);
  draw_.presence_penalty = static_cast<float>(rules_.presence_penalty);
  draw_.num_top = static_cast<int32_t>(std::max<int64_t>(rules_.top, 0));
  penalises_ = rules_.repetition_penalty != 1 || rules_.frequency_penalty != 0 || rules_.presence_penalty != 0;
  plain_ = !guided() && !penalises_ && rules_.logit_bias.empty() && rules_.bad_words.empty() &&
           rules_.min_tokens == 0 && rules_.min_p == 0 && rules_.top < 0;
  Biases& lasting = biases_.emplace_back();
  for (const auto& [token, bias] : rules_.logit_bias) {
    lasting.ids.push_back(token);
    lasting.values.push_back(static_cast<float>(bias));
  }
  for (const std::vector<int32_t>& word : rules_.bad_words)
    if (word.size() == 1) lasting.ban(word.back());
  num_lasting_ = lasting.ids.size();
  const auto bits = static_cast<size_t>(vocab + 31) / 32;
  if (guided())
    mask_.resize(std::max(bits, rules_.grammar ? static_cast<size_t>(rules_.grammar->mask_words) : size_t{0}));
  begin_grammar();
}

// From the tokens that were generated before: also where the grammar has seen some of them, or more.
void Sequence::begin_grammar() {
  auto rest = std::span(tokens_).subspan(static_cast<size_t>(num_prompt_));
  const bool decided_against = !rest.empty() && rules_.reasoning_begin >= 0 && rest.front() != rules_.reasoning_begin;
  if (!rules_.reasoning_end.empty() && !may_begin_to_reason() && !decided_against) {
    const auto found = std::ranges::search(rest, rules_.reasoning_end);
    reasons_ = found.empty();
    rest = rest.subspan(static_cast<size_t>(found.end() - rest.begin()));
  }
  if (!rules_.grammar) return;
  require(rules_.grammar->mask_words >= 0, "a mask has no negative number of words");
  require(call<int32_t (*)(void*)>(rules_.grammar->reset)(state(*rules_.grammar)) == 0,
          "the grammar has failed before");
  for (const int32_t token : rest)
    if (!reasons_) grammar_stops(token);
}

bool Sequence::grammar_stops(int32_t token) {
  const NativeGrammar& grammar = *rules_.grammar;
  // What fails here leaves the grammar in error: then the next mask fails, and with it the sequence.
  const bool fails =
      call<int32_t (*)(void*, uint32_t)>(grammar.consume)(state(grammar), static_cast<uint32_t>(token)) != 0;
  return !fails && call<bool (*)(const void*)>(grammar.is_stopped)(state(grammar));
}

bool Sequence::over_budget() const {
  return reasons_ && rules_.reasoning_budget >= 0 && num_generated() >= rules_.reasoning_budget;
}

const uint32_t* Sequence::allowed() {
  if (reasons_ && !over_budget()) return nullptr;
  if (!reasons_ && !rules_.grammar) return nullptr;
  std::ranges::fill(mask_, 0u);
  if (reasons_) {
    size_t done = rules_.reasoning_end.size() - 1;
    while (done > 0 && !generated_end_with(std::span(rules_.reasoning_end).first(done))) --done;
    const auto token = static_cast<size_t>(rules_.reasoning_end[done]);
    mask_[token / 32] |= 1u << (token % 32);
    return mask_.data();
  }
  fill_mask(mask_);
  if (may_begin_to_reason()) {
    const auto token = static_cast<size_t>(rules_.reasoning_begin);
    mask_[token / 32] |= 1u << (token % 32);
  }
  return mask_.data();
}

void Sequence::next(std::span<const int32_t> drafts, std::vector<Draw>& draws) {
  drop_drafts();  // of a step that was abandoned
  if (ending_ != Ending::kNone) throw std::invalid_argument("a sequence that has ended draws no more");
  const auto count = static_cast<int64_t>(drafts.size());
  if (count > 0) {
    require(rules_.reasoning_end.empty(), "a sequence with a reasoning part draws from one row");
    require(num_generated() + count < rules_.max_tokens,
            "a sequence has more drafts than tokens that it may still get");
  }
  if (biases_.size() <= drafts.size()) biases_.resize(drafts.size() + 1, biases_[0]);
  if (tokens_.capacity() < tokens_.size() + drafts.size())  // draws point to the tokens
    tokens_.reserve(2 * (tokens_.size() + drafts.size()));
  draws.push_back(next_draw(biases_[0]));
  for (size_t i = 0; i < drafts.size(); ++i) {
    tokens_.push_back(drafts[i]);
    ++num_drafts_;
    draws.push_back(next_draw(biases_[i + 1]));
  }
  tells_late_ = count > 0 && rules_.grammar;
  if (tells_late_) allow_drafts(drafts, std::span(draws).last(drafts.size() + 1));
}

void Sequence::drop_drafts() {
  tokens_.resize(tokens_.size() - num_drafts_);
  num_drafts_ = 0;
}

void Sequence::fill_mask(std::vector<uint32_t>& mask) {
  const NativeGrammar& grammar = *rules_.grammar;
  const auto bytes = static_cast<size_t>(grammar.mask_words) * sizeof(uint32_t);
  std::ranges::fill(mask, 0u);
  if (call<int32_t (*)(void*, uint32_t*, size_t)>(grammar.fill_mask)(state(grammar), mask.data(), bytes) != 0)
    std::ranges::fill(mask, 0u);  // no token is left: the sequence fails, and the grammar knows why
}

void Sequence::allow_drafts(std::span<const int32_t> drafts, std::span<Draw> draws) {
  while (masks_.size() < draws.size()) masks_.emplace_back(mask_.size());
  size_t taken = 0;
  bool reached = true;  // else a draft before it is not allowed, or is the last token: the draw will not count
  for (size_t i = 0; i < draws.size(); ++i) {
    draws[i].drawn = nullptr;
    draws[i].allowed = nullptr;
    if (!reached) continue;
    fill_mask(masks_[i]);
    draws[i].allowed = [](void* mask) -> const uint32_t* { return static_cast<uint32_t*>(mask); };
    draws[i].guided = masks_[i].data();
    if (i == drafts.size()) break;
    const auto token = static_cast<size_t>(drafts[i]);
    reached = (masks_[i][token / 32] >> (token % 32) & 1u) != 0;
    if (!reached) continue;
    ++taken;
    reached = !grammar_stops(drafts[i]);
  }
  const NativeGrammar& grammar = *rules_.grammar;
  if (taken > 0)  // what fails leaves the grammar in error, which the next mask shows
    call<int32_t (*)(void*, size_t)>(grammar.rollback)(state(grammar), taken);
}

Draw Sequence::next_draw(Biases& biases) {
  biases.ids.resize(num_lasting_);
  biases.values.resize(num_lasting_);
  for (const std::vector<int32_t>& word : rules_.bad_words)
    if (word.size() > 1 && generated_end_with(std::span(word).first(word.size() - 1))) biases.ban(word.back());
  const bool ends_too_early = num_generated() < rules_.min_tokens && !over_budget();
  if (ends_too_early || (reasons_ && rules_.grammar))  // an answer that ends before its grammar begins breaks it
    for (const int32_t token : rules_.end_ids) biases.ban(token);
  Draw draw = draw_;
  if (guided()) {
    draw.allowed = [](void* self) { return static_cast<Sequence*>(self)->allowed(); };
    draw.drawn = [](void* self, int32_t token) { static_cast<Sequence*>(self)->drawn(token); };
    draw.guided = this;
  }
  draw.counter = static_cast<uint64_t>(num_generated());
  draw.bias_ids = biases.ids.data();
  draw.bias = biases.values.data();
  draw.num_biases = static_cast<int64_t>(biases.ids.size());
  if (penalises_) {
    draw.history = tokens_.data();
    draw.history_length = static_cast<int64_t>(tokens_.size());
    draw.num_prompt = num_prompt_;
  }
  return draw;
}

void Sequence::drawn(int32_t token) {
  const bool reasons = reasons_ || (may_begin_to_reason() && token == rules_.reasoning_begin);
  grammar_ends_ = rules_.grammar && !reasons && grammar_stops(token);
}

void Sequence::append(int32_t token, float log_prob) {
  if (token < 0 || !std::isfinite(log_prob)) {
    ending_ = Ending::kFailed;
    return;
  }
  if (tells_late_) drawn(token);
  reasons_ = reasons_ || (may_begin_to_reason() && token == rules_.reasoning_begin);
  tokens_.push_back(token);
  reasons_ = reasons_ && !generated_end_with(rules_.reasoning_end);
  if (grammar_ends_ || (num_generated() >= rules_.min_tokens && stops()))
    ending_ = Ending::kStop;
  else if (num_generated() >= rules_.max_tokens)
    ending_ = Ending::kLength;
}

bool Sequence::stops() const {
  return std::ranges::find(rules_.end_ids, tokens_.back()) != rules_.end_ids.end() ||
         std::ranges::any_of(rules_.stop_words, [this](const auto& word) { return generated_end_with(word); });
}

// A word does not begin in the prompt.
bool Sequence::generated_end_with(std::span<const int32_t> word) const {
  const auto length = static_cast<int64_t>(word.size());
  return length <= num_generated() && std::equal(word.begin(), word.end(), tokens_.end() - length);
}

void Sequence::Biases::ban(int32_t token) {
  ids.push_back(token);
  values.push_back(-std::numeric_limits<float>::infinity());
}

}  // namespace ingot
