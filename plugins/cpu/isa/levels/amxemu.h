// The level amx in plain C++.
#pragma once

#include "isa/concepts.h"
#include "isa/int8_emulated.h"
#include "isa/tile_emulated.h"

#define INGOT_LEVEL "amxemu"

namespace ingot {

using Simd = SimdEmulated;
using Int8 = Int8Emulated;
using PlainSimd = SimdEmulated;
using PlainInt8 = Int8Emulated;
using F8Pairs = void;  // numbers are widened one by one
using TileUnit = TilesEmulated;

static_assert(FloatVector<Simd>);
static_assert(Int8Vector<Int8>);
static_assert(TileRegisters<TileUnit>);

}  // namespace ingot
