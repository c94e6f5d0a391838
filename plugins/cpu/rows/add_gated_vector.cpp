#include INGOT_LEVEL_HEADER
#include "rows/add_gated_kernel.h"

INGOT_KERNEL("add_gated.f32." INGOT_LEVEL, AddGatedArgs, ingot::add_gated<ingot::Simd>)
