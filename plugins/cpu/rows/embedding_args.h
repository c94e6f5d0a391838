// What kernels of embedding take.
#pragma once

#include <cstdint>

namespace ingot {

struct EmbeddingArgs {
  const int32_t* ids;          // [tokens]
  const int32_t* positions;    // [tokens]
  const void* table;           // [vocab, hidden]
  const void* position_table;  // [positions, hidden] or null, same type
  float* y;                    // [tokens, hidden]
  int64_t rows, hidden;        // rows: tokens
  float scale;                 // of the table's rows
};

}  // namespace ingot
