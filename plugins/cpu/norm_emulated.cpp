#include "norm_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("rms_norm.f32.avx512emu", NormArgs, (ingot::norm<ingot::SimdEmulated, false>))
INGOT_KERNEL("layer_norm.f32.avx512emu", NormArgs, (ingot::norm<ingot::SimdEmulated, true>))
