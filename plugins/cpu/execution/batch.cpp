#include "execution/batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ingot {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

std::string in_range(const char* what, int64_t index, int64_t value, int64_t end) {
  return std::string(what) + " " + std::to_string(index) + " is " + std::to_string(value) + ", expected 0 to " +
         std::to_string(end - 1);
}

int64_t blocks_for(int64_t tokens, int64_t block_size) { return (tokens + block_size - 1) / block_size; }

}  // namespace

Batch::Batch(const LimitsSpec& limits, const std::vector<CacheSpec>& caches)
    : limits_(limits), block_size_(caches[0].tokens_per_block) {
  for (const CacheSpec& cache : caches)
    groups_.push_back(
        {cache.window, !cache.state.empty(), std::vector<int32_t>(static_cast<size_t>(cache.num_blocks), -1)});
  const auto max_tokens = static_cast<size_t>(limits.max_num_tokens);
  const auto max_sequences = static_cast<size_t>(limits.max_batch_size);
  ids.resize(max_tokens);
  positions.resize(max_tokens);
  sequence_of.resize(max_tokens);
  query_starts.resize(max_sequences + 1);
  past_lengths.resize(max_sequences);
  logit_rows.resize(static_cast<size_t>(limits.max_logit_rows));
  whole_rows.resize(static_cast<size_t>(limits.max_logit_rows));
}

void Batch::assign(const BatchView& view) {
  check_sequences(view);
  check_tokens(view);
  for (size_t group = 0; group < groups_.size(); ++group) check_blocks(view, group);
  tokens = static_cast<int64_t>(view.ids.size());
  sequences = static_cast<int64_t>(view.past_lengths.size());
  rows = static_cast<int64_t>(view.logit_rows.size());
  table_width = view.table_width;
  std::ranges::copy(view.ids, ids.begin());
  std::ranges::copy(view.query_starts, query_starts.begin());
  std::ranges::copy(view.past_lengths, past_lengths.begin());
  std::ranges::copy(view.logit_rows, logit_rows.begin());
  std::fill_n(whole_rows.begin(), rows, 1);
  block_tables.assign(view.block_tables.begin(), view.block_tables.end());
  for (int64_t s = 0; s < sequences; ++s) {
    for (int32_t t = query_starts[s]; t < query_starts[s + 1]; ++t) {
      positions[t] = past_lengths[s] + t - query_starts[s];
      sequence_of[t] = static_cast<int32_t>(s);
    }
  }
}

void Batch::check_sequences(const BatchView& view) const {
  const auto count = static_cast<int64_t>(view.past_lengths.size()), total = static_cast<int64_t>(view.ids.size());
  require(count >= 1 && count <= limits_.max_batch_size,
          "a step carries 1 to " + std::to_string(limits_.max_batch_size) + " sequences, got " + std::to_string(count));
  require(total >= 1 && total <= limits_.max_num_tokens,
          "a step carries 1 to " + std::to_string(limits_.max_num_tokens) + " tokens, got " + std::to_string(total));
  require(static_cast<int64_t>(view.query_starts.size()) == count + 1,
          "query_starts must have one entry per sequence and one more");
  require(view.query_starts.front() == 0 && view.query_starts.back() == total,
          "query_starts must begin at 0 and end at the number of tokens");
  require(view.table_width >= 0 &&
              static_cast<int64_t>(view.block_tables.size()) == std::ssize(groups_) * count * view.table_width,
          "block_tables must have one table per cache group, with one row per sequence");
  for (int64_t s = 0; s < count; ++s) {
    const int64_t new_tokens = int64_t{view.query_starts[s + 1]} - view.query_starts[s];
    require(new_tokens >= 1, "query_starts must ascend: sequence " + std::to_string(s) + " has no tokens");
    const int64_t past = view.past_lengths[s];
    require(past >= 0 && past + new_tokens <= limits_.max_positions,
            "sequence " + std::to_string(s) + " reaches " + std::to_string(past + new_tokens) +
                " tokens, the limit is " + std::to_string(limits_.max_positions));
    require(blocks_for(past + new_tokens, block_size_) <= view.table_width,
            "sequence " + std::to_string(s) + " needs " + std::to_string(blocks_for(past + new_tokens, block_size_)) +
                " blocks, block_tables has " + std::to_string(view.table_width));
  }
}

void Batch::check_tokens(const BatchView& view) const {
  for (size_t t = 0; t < view.ids.size(); ++t)
    require(view.ids[t] >= 0 && view.ids[t] < limits_.vocab_size,
            in_range("token id", static_cast<int64_t>(t), view.ids[t], limits_.vocab_size));
  require(static_cast<int64_t>(view.logit_rows.size()) <= limits_.max_logit_rows,
          "a step gives at most " + std::to_string(limits_.max_logit_rows) + " rows of logits, asked for " +
              std::to_string(view.logit_rows.size()));
  const auto total = static_cast<int64_t>(view.ids.size());
  for (size_t r = 0; r < view.logit_rows.size(); ++r) {
    require(view.logit_rows[r] >= 0 && view.logit_rows[r] < total,
            in_range("logit row", static_cast<int64_t>(r), view.logit_rows[r], total));
    require(r == 0 || view.logit_rows[r] > view.logit_rows[r - 1], "logit_rows must ascend");
  }
}

// A block that this step writes belongs to one sequence and appears once in its table. Those that no token of the step
// sees any more are no longer the sequence's, whatever its table says.
void Batch::check_blocks(const BatchView& view, size_t group) {
  auto& [window, keeps_state, writer] = groups_[group];
  std::ranges::fill(writer, -1);
  const auto num_blocks = static_cast<int64_t>(writer.size());
  const int32_t* const tables =
      view.block_tables.data() + group * view.past_lengths.size() * static_cast<size_t>(view.table_width);
  const auto shared = [](int32_t block) {
    return "block " + std::to_string(block) + " is written in this step and must appear in one place of one table";
  };
  for (const bool writing : {true, false}) {
    for (size_t s = 0; s < view.past_lengths.size(); ++s) {
      const int64_t past = view.past_lengths[s], total = past + view.query_starts[s + 1] - view.query_starts[s];
      const int64_t first_written = past / block_size_, end = blocks_for(total, block_size_);
      const int64_t first_seen = window == 0 ? 0 : std::max<int64_t>(past + 1 - window, 0) / block_size_;
      for (int64_t w = writing ? first_written : first_seen; w < (writing ? end : first_written); ++w) {
        const int32_t block = tables[s * static_cast<size_t>(view.table_width) + static_cast<size_t>(w)];
        // a state need not be kept after each block, and may stay in its slot
        if (keeps_state && writing && block == -1 && w + 1 < end) continue;
        require(block >= 0 && block < num_blocks, in_range("block of entry", w, block, num_blocks));
        const int32_t holder = writer[static_cast<size_t>(block)];
        require(holder < 0 || (keeps_state && holder == static_cast<int32_t>(s)), shared(block));
        if (writing) writer[static_cast<size_t>(block)] = static_cast<int32_t>(s);
      }
    }
  }
}

}  // namespace ingot
