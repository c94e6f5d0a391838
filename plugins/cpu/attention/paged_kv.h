// The KV cache as the kernels of attention see it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot {

// One layer's part of block 0, from which block b's lies b * block_bytes further on, and the batch that uses them.
// Entries of a table for blocks that no token of the step sees may be anything: no kernel reads them.
// How a head's keys and values lie in it: plugins/cpu/attention/kv_layout.h.
struct PagedKv {
  std::byte* keys;
  std::byte* values;
  int64_t block_bytes;
  int64_t kv_heads, head_dim;
  int64_t value_dim, padded_dim;  // numbers of a value, and these rounded up to 16
  int64_t block_size;
  int64_t group;                // of the plan's cache groups: the one that the layer is in
  const int32_t* block_tables;  // of the group, [sequences, table_width]
  int64_t table_width;
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* past_lengths;  // [sequences]
  const int32_t* positions;     // [tokens]
  const int32_t* sequence_of;   // [tokens]
  int64_t sequences, tokens;
};

}  // namespace ingot
