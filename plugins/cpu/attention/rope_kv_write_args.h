// What kernels of rope_kv_write take.
#pragma once

#include <cstdint>

#include "attention/paged_kv.h"
#include "ingot/kernel.h"

namespace ingot {

struct RopeKvWriteArgs {
  const float* qkv;      // [tokens, (heads + 2 kv_heads) * head_dim], without values where keys_as_values
  const float* cos_sin;  // [tokens, 2 * half] or null
  float* q;              // [tokens, heads * head_dim] or null: attention rotates the queries itself
  const float* q_norm;   // [q_run] or null: an RMS norm over each run of so many dims before the rotation
  const float* k_norm;   // [k_run] or null
  PagedKv kv;
  int64_t heads, half, q_run, k_run;
  float norm_eps;
  bool interleaved;
  bool value_norm;      // values are normed head by head, without weights
  bool keys_as_values;  // values are the keys as they are before their norm and rotation

  int64_t width() const { return (heads + (keys_as_values ? 1 : 2) * kv.kv_heads) * kv.head_dim; }
};

// Queries that attention norms and rotates itself, by the kernel that else would, where norms take each head alone.
struct RopeQueries {
  void (*run)(const void* args, const Team& team);
  RopeKvWriteArgs args;
};

}  // namespace ingot
