#include INGOT_LEVEL_HEADER
#include "rows/norm_kernel.h"

INGOT_KERNEL("rms_norm.f32." INGOT_LEVEL, NormArgs, (ingot::norm<ingot::Simd, false>))
INGOT_KERNEL("layer_norm.f32." INGOT_LEVEL, NormArgs, (ingot::norm<ingot::Simd, true>))
