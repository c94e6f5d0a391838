// y[t] = table[ids[t]] (+ position_table[positions[t]]), widened to float32. Reads 2 or 4 bytes per element once.
#pragma once

#include <type_traits>

#include "ingot/kernel.h"

namespace ingot {
namespace {

template <typename S>
[[gnu::always_inline]] inline typename S::V load_as_f32(const float* p, int64_t n) {
  return n >= S::kWidth ? S::load(p) : S::load_partial(p, n);
}

template <typename S>
[[gnu::always_inline]] inline typename S::V load_as_f32(const uint16_t* p, int64_t n) {
  return n >= S::kWidth ? S::load_bf16(p) : S::load_bf16_partial(p, n);
}

template <typename S, typename T>
void embedding(const EmbeddingArgs& args, const Team& team) {
  const Team::Range mine = team.share(args.tokens);
  for (int64_t t = mine.begin; t < mine.end; ++t) {
    const T* row = static_cast<const T*>(args.table) + args.ids[t] * args.hidden;
    const T* position =
        args.position_table ? static_cast<const T*>(args.position_table) + args.positions[t] * args.hidden : nullptr;
    float* y = args.y + t * args.hidden;
    for (int64_t i = 0; i < args.hidden; i += S::kWidth) {
      const int64_t left = args.hidden - i;
      typename S::V v = load_as_f32<S>(row + i, left);
      if (position) v = S::add(v, load_as_f32<S>(position + i, left));
      left >= S::kWidth ? S::store(y + i, v) : S::store_partial(y + i, v, left);
    }
  }
}

}  // namespace
}  // namespace ingot
