// The level avx512bf16 in plain C++.
#pragma once

#include "isa/concepts.h"
#include "isa/simd_emulated.h"

#define INGOT_LEVEL "avx512bf16emu"

namespace ingot {

using Pairs = PairsEmulated;
using TablePairs = Pairs;

static_assert(PairVector<Pairs>);

}  // namespace ingot
