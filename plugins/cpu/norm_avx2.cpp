#include "norm_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("rms_norm.f32.avx2", NormArgs, (ingot::norm<ingot::SimdAvx2, false>))
INGOT_KERNEL("layer_norm.f32.avx2", NormArgs, (ingot::norm<ingot::SimdAvx2, true>))
