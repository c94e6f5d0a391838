// What kernels of the level avx512bf16 add.
#pragma once

#include "isa/concepts.h"
#include "isa/simd_avx512vbmi.h"

#define INGOT_LEVEL "avx512bf16"

namespace ingot {

using Pairs = PairsAvx512;
using TablePairs = TablePairsAvx512;  // where the CPU permutes bytes

static_assert(PairVector<Pairs> && PairVector<TablePairs>);

}  // namespace ingot
