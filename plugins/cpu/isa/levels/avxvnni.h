// What kernels of the level avxvnni add.
#pragma once

#include "isa/concepts.h"
#include "isa/dots_avxvnni.h"
#include "isa/int8_dots.h"

#define INGOT_LEVEL "avxvnni"

namespace ingot {

using Int8 = Int8Dots<DotsAvxVnni>;

static_assert(Int8Vector<Int8>);

}  // namespace ingot
