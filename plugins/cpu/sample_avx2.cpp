#include "sample_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("sample.f32.avx2", SampleArgs, ingot::sample<ingot::SimdAvx2>)
