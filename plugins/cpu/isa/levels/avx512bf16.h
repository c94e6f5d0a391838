// What kernels of the level avx512bf16 add.
#pragma once

#include "isa/concepts.h"
#include "isa/simd_avx512bf16.h"

#define INGOT_LEVEL "avx512bf16"

namespace ingot {

using Pairs = PairsAvx512;

static_assert(PairVector<Pairs>);

}  // namespace ingot
