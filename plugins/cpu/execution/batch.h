// One step's batch: checked, copied, and extended with what kernels want to know of each token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "execution/plan_spec.h"

namespace ingot {

// The arrays of src/ingot/step_io.py.
struct BatchView {
  std::span<const int32_t> ids, query_starts, past_lengths, block_tables, logit_rows;
  int64_t table_width = 0;  // block_tables: [cache groups, sequences, table_width]
};

// Owns the copy that kernels read, so that nobody can change a checked batch. The addresses of ids, positions,
// sequence_of, query_starts, past_lengths, logit_rows and whole_rows never change.
class Batch {
 public:
  Batch(const LimitsSpec& limits, const std::vector<CacheSpec>& caches);

  // Throws std::invalid_argument in words and leaves nothing that a kernel would read beyond its memory.
  void assign(const BatchView& view);

  int64_t tokens = 0, sequences = 0, rows = 0, table_width = 0;
  std::vector<int32_t> ids, positions, sequence_of, query_starts, past_lengths, logit_rows;
  std::vector<int32_t> whole_rows;  // of logit_rows: 1; 0 where nobody wants more than the best token
  std::vector<int32_t> block_tables;

 private:
  void check_tokens(const BatchView& view) const;
  void check_sequences(const BatchView& view) const;
  void check_blocks(const BatchView& view, size_t group);

  LimitsSpec limits_;
  int64_t block_size_;
  // Of a cache group. writer: per block, the sequence that writes it in this step, or -1.
  struct Group {
    int64_t window;
    bool keeps_state;
    std::vector<int32_t> writer;
  };
  std::vector<Group> groups_;
};

}  // namespace ingot
