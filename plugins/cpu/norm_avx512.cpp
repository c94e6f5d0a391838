#include "norm_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("rms_norm.f32.avx512", NormArgs, (ingot::norm<ingot::SimdAvx512, false>))
INGOT_KERNEL("layer_norm.f32.avx512", NormArgs, (ingot::norm<ingot::SimdAvx512, true>))
