// Counts that become constants.
#pragma once

#include <cstdint>

namespace ingot {
namespace {

// Calls f.template operator()<n>() for the n in kLeast .. kMost that is asked for.
template <int kMost, int kLeast = 1, typename F>
[[gnu::always_inline]] inline void with_count(int64_t n, F f) {
  if constexpr (kMost > kLeast) {
    if (n < kMost) return with_count<kMost - 1, kLeast>(n, f);
  }
  f.template operator()<kMost>();
}

}  // namespace
}  // namespace ingot
