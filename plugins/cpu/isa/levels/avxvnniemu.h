// The level avxvnni in AVX2.
#pragma once

#include "isa/concepts.h"
#include "isa/dots_avx2.h"
#include "isa/int8_dots.h"

#define INGOT_LEVEL "avxvnniemu"

namespace ingot {

using Int8 = Int8Dots<DotsAvx2>;

static_assert(Int8Vector<Int8>);

}  // namespace ingot
