#include "sample_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("sample.f32.avx512", SampleArgs, ingot::sample<ingot::SimdAvx512>)
