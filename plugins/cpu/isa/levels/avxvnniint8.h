// What kernels of the level avxvnniint8 add.
#pragma once

#include "isa/concepts.h"
#include "isa/dots_vex.h"
#include "isa/int8_dots.h"

#define INGOT_LEVEL "avxvnniint8"

namespace ingot {

using Int8 = Int8Dots<DotsAvxVnniInt8>;

static_assert(Int8Vector<Int8>);

}  // namespace ingot
