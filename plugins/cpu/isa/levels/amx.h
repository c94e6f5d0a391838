// What kernels of the level amx add.
#pragma once

#include "isa/concepts.h"
#include "isa/simd_amx.h"
#include "isa/tile_amx.h"

#define INGOT_LEVEL "amx"

namespace ingot {

using Simd = SimdAmx;
using Int8 = Int8Amx;
using PlainSimd = SimdAvx512;
using PlainInt8 = Int8Avx512;
using F8Pairs = F8PairsAmx;  // where the CPU permutes bytes
using TileUnit = TilesAmx;

static_assert(FloatVector<Simd>);
static_assert(Int8Vector<Int8>);
static_assert(TileRegisters<TileUnit>);

}  // namespace ingot
