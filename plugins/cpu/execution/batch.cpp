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

Batch::Batch(const LimitsSpec& limits, int64_t tokens_per_block, int64_t num_blocks)
    : limits_(limits), block_size_(tokens_per_block), writer_(static_cast<size_t>(num_blocks), -1) {
  const auto max_tokens = static_cast<size_t>(limits.max_num_tokens);
  const auto max_sequences = static_cast<size_t>(limits.max_batch_size);
  ids.resize(max_tokens);
  positions.resize(max_tokens);
  sequence_of.resize(max_tokens);
  query_starts.resize(max_sequences + 1);
  past_lengths.resize(max_sequences);
  logit_rows.resize(static_cast<size_t>(limits.max_logit_rows));
}

void Batch::assign(const BatchView& view) {
  check_sequences(view);
  check_tokens(view);
  check_blocks(view);
  tokens = static_cast<int64_t>(view.ids.size());
  sequences = static_cast<int64_t>(view.past_lengths.size());
  rows = static_cast<int64_t>(view.logit_rows.size());
  table_width = view.table_width;
  std::ranges::copy(view.ids, ids.begin());
  std::ranges::copy(view.query_starts, query_starts.begin());
  std::ranges::copy(view.past_lengths, past_lengths.begin());
  std::ranges::copy(view.logit_rows, logit_rows.begin());
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
  require(view.table_width >= 0 && static_cast<int64_t>(view.block_tables.size()) == count * view.table_width,
          "block_tables must have one row per sequence");
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

// A block that this step writes belongs to one sequence and appears once in its table.
void Batch::check_blocks(const BatchView& view) {
  std::ranges::fill(writer_, -1);
  const auto num_blocks = static_cast<int64_t>(writer_.size());
  const auto shared = [](int32_t block) {
    return "block " + std::to_string(block) + " is written in this step and must appear in one place of one table";
  };
  for (const bool writing : {true, false}) {
    for (size_t s = 0; s < view.past_lengths.size(); ++s) {
      const int64_t past = view.past_lengths[s], total = past + view.query_starts[s + 1] - view.query_starts[s];
      const int64_t first_written = past / block_size_, end = blocks_for(total, block_size_);
      for (int64_t w = writing ? first_written : 0; w < (writing ? end : first_written); ++w) {
        const int32_t block = view.block_tables[s * static_cast<size_t>(view.table_width) + static_cast<size_t>(w)];
        require(block >= 0 && block < num_blocks, in_range("block of entry", w, block, num_blocks));
        require(writer_[static_cast<size_t>(block)] < 0, shared(block));
        if (writing) writer_[static_cast<size_t>(block)] = static_cast<int32_t>(s);
      }
    }
  }
}

}  // namespace ingot
