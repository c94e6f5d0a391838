// y[t] = table[ids[t]] * scale (+ position_table[positions[t]]), widened to float32. Reads 2 or 4 bytes per element once.
#pragma once

#include "ingot/kernel.h"
#include "simd_lanes.h"

namespace ingot {
namespace {

template <typename S, typename T>
void embedding(const EmbeddingArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.tokens);
  const T* table = static_cast<const T*>(args.table);
  const T* position_table = static_cast<const T*>(args.position_table);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* row = table + args.ids[t] * args.hidden;
    const T* position = position_table ? position_table + args.positions[t] * args.hidden : nullptr;
    float* y = args.y + t * args.hidden;
    for (int64_t i = 0; i < args.hidden; i += S::kWidth) {
      const int64_t left = args.hidden - i;
      typename S::V v = S::mul(load_lanes<S>(row + i, left), S::set1(args.scale));
      if (position) v = S::add(v, load_lanes<S>(position + i, left));
      store_lanes<S>(y + i, v, left);
    }
  }
}

}  // namespace
}  // namespace ingot
