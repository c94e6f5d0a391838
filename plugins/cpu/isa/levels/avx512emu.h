// The level avx512 in plain C++.
#pragma once

#include "isa/concepts.h"
#include "isa/int8_emulated.h"

#define INGOT_LEVEL "avx512emu"

namespace ingot {

using Simd = SimdEmulated;
using Int8 = Int8Emulated;
using TableInt8 = Int8;

static_assert(FloatVector<Simd>);
static_assert(Int8Vector<Int8>);

}  // namespace ingot
