#include INGOT_LEVEL_HEADER
#include "recurrent/gated_norm_kernel.h"

INGOT_KERNEL("gated_norm.f32." INGOT_LEVEL, GatedNormArgs, ingot::gated_norm<ingot::Simd>)
INGOT_KERNEL("sigmoid_gate.f32." INGOT_LEVEL, ElementsArgs<2>, ingot::sigmoid_gate<ingot::Simd>)
