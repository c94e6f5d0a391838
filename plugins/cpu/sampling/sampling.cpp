#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace ingot {
namespace {

// Words are put together only where they are needed: every draw of every step comes by.
void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

void require_within(const char* what, int64_t value, int64_t begin, int64_t end) {
  if (value >= begin && value < end) return;
  throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", expected " +
                              std::to_string(begin) + " to " + std::to_string(end - 1));
}

}  // namespace

Sampler::Sampler(int64_t slots, int64_t vocab) : vocab_(vocab), sequences_(static_cast<size_t>(slots)) {}

void Sampler::start(int64_t slot, SequenceRules rules, std::span<const int32_t> tokens, int64_t num_prompt) {
  require_within("a slot", slot, 0, static_cast<int64_t>(sequences_.size()));
  sequences_[static_cast<size_t>(slot)] = Sequence(std::move(rules), tokens, num_prompt, vocab_);
}

void Sampler::end(int64_t slot) {
  require_within("a slot", slot, 0, static_cast<int64_t>(sequences_.size()));
  sequences_[static_cast<size_t>(slot)].reset();
}

Sequence& Sampler::at(int64_t slot) {
  require_within("a slot", slot, 0, static_cast<int64_t>(sequences_.size()));
  std::optional<Sequence>& found = sequences_[static_cast<size_t>(slot)];
  if (!found.has_value()) throw std::invalid_argument("no sequence was started in slot " + std::to_string(slot));
  return *found;
}

void Sampler::lay_out(std::span<const int32_t> rows, std::span<const int32_t> slots,
                      const std::optional<KnownView>& known, int64_t num_rows, std::span<const int32_t> drafts) {
  drafts_.assign(drafts.begin(), drafts.end());
  drafts_.resize(rows.size(), -1);
  drawing_.clear();
  draws_.clear();
  ranks_.clear();
  for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    for (end = begin + 1; end < rows.size() && drafts_[end] >= 0;) ++end;
    Sequence* sequence = &at(slots[begin]);
    require(std::ranges::find(drawing_, sequence) == drawing_.end(), "the draws of a sequence are not neighbours");
    sequence->next(std::span(drafts_).subspan(begin + 1, end - begin - 1), draws_);
    for (size_t q = begin; q < end; ++q) {
      require_within("the row of a draw", rows[q], 0, num_rows);
      drawing_.push_back(sequence);
      draws_[q].row = rows[q];
      ranks_.push_back(sequence->wants_rank());
    }
  }
  if (!known) return;
  require(known->token.size() == known->row.size() && known->top.size() == known->row.size(),
          "the arrays of known tokens must have equal lengths");
  for (size_t k = 0; k < known->row.size(); ++k) {
    require_within("the row of a known token", known->row[k], 0, num_rows);
    require_within("a known token", known->token[k], 0, vocab_);
    require(known->top[k] >= 0 && known->top[k] <= vocab_, "there are fewer tokens than wanted");
    draws_.push_back({.row = known->row[k], .known = known->token[k], .num_top = known->top[k]});
    ranks_.push_back(1);
  }
}

void Sampler::draw_from(const float* processed) {
  for (size_t q = 0; q < drawing_.size(); ++q) draws_[q].processed = processed + static_cast<int64_t>(q) * vocab_;
}

void Sampler::leave_best_only(std::span<int32_t> whole_rows) {
  for (size_t q = 0; q < draws_.size(); ++q) {
    draws_[q].best_only = q < drawing_.size() && drawing_[q]->only_best();
    whole_rows[static_cast<size_t>(draws_[q].row)] = !draws_[q].best_only;
  }
}

SampleArgs Sampler::arguments(const float* logits, DrawResult& result) {
  const size_t n = draws_.size(), before = result.ids.size(), top_before = result.top_ids.size();
  size_t top = 0;
  for (const Draw& draw : draws_) top += static_cast<size_t>(draw.num_top);
  result.ranked = std::ranges::find(ranks_, 1) != ranks_.end();
  result.ids.resize(before + n);
  result.log_probs.resize(before + n);
  result.token_ranks.resize(result.ranked ? before + n : 0);
  result.top_ids.resize(top_before + top);
  result.top_log_probs.resize(top_before + top);
  top = top_before;
  for (size_t q = 0; q < n; ++q) {
    Draw& draw = draws_[q];
    if (ranks_[q]) draw.rank = &result.token_ranks[before + q];
    draw.top_ids = result.top_ids.data() + top;
    draw.top_log_probs = result.top_log_probs.data() + top;
    top += static_cast<size_t>(draw.num_top);
  }
  return {.logits = logits,
          .vocab = vocab_,
          .num_draws = count(),
          .draws = draws_.data(),
          .ids = result.ids.data() + before,
          .log_probs = result.log_probs.data() + before};
}

bool Sampler::record(DrawResult& result, bool hides) {
  const size_t row = result.ids.size() - draws_.size();
  result.ends.clear();
  bool any = false;
  bool counts = true;
  for (size_t q = 0; q < drawing_.size(); ++q) {
    Sequence& sequence = *drawing_[q];
    int32_t& id = result.ids[row + q];
    float& log_prob = result.log_probs[row + q];
    if (drafts_[q] < 0) {
      sequence.drop_drafts();
      counts = true;
    } else {  // one that fails here fails again when it is the first
      counts = counts && result.ids[row + q - 1] == drafts_[q] && sequence.ending() == Ending::kNone && id >= 0 &&
               std::isfinite(log_prob);
    }
    if (!counts) {
      id = kNotDrawn;
      log_prob = kNoLogProb;
      if (result.ranked) result.token_ranks[row + q] = 0;
      result.ends.push_back(static_cast<int32_t>(Ending::kNone));
      continue;
    }
    sequence.append(id, log_prob);
    if (hides && !sequence.wants_log_prob() && std::isfinite(log_prob)) log_prob = kNoLogProb;
    result.ends.push_back(static_cast<int32_t>(sequence.ending()));
    any = any || sequence.ending() != Ending::kNone;
  }
  ++result.steps;
  return any;
}

}  // namespace ingot
