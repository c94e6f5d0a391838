// What kernels of the level avx2 are made of.
#pragma once

#include "isa/concepts.h"
#include "isa/int8_avx2.h"

#define INGOT_LEVEL "avx2"

namespace ingot {

using Simd = SimdAvx2;
using Int8 = Int8Avx2;
using TableInt8 = Int8;

static_assert(FloatVector<Simd>);
static_assert(Int8Vector<Int8>);

}  // namespace ingot
