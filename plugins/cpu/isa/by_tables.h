// The choice between two ways to widen codes: by tables of bytes, and without.
#pragma once

#include <type_traits>

#include "isa/cpu_isa.h"

namespace ingot {
namespace {

// f<Tables>() on CPUs that permute bytes, f<Plain>() on all others.
template <typename Plain, typename Tables, typename F>
void by_tables(F f) {
  if (!std::is_same_v<Plain, Tables> && permutes_bytes) return f.template operator()<Tables>();
  f.template operator()<Plain>();
}

}  // namespace
}  // namespace ingot
