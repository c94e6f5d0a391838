// What kernels of the level avx512 are made of.
#pragma once

#include "isa/concepts.h"
#include "isa/int8_avx512vbmi.h"

#define INGOT_LEVEL "avx512"

namespace ingot {

using Simd = SimdAvx512;
using Int8 = Int8Avx512;
using TableInt8 = TableInt8Avx512;  // where the CPU permutes bytes

static_assert(FloatVector<Simd>);
static_assert(GroupVector<Int8>);

}  // namespace ingot
