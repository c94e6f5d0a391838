#include "sample_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("sample.f32.avx512emu", SampleArgs, ingot::sample<ingot::SimdEmulated>)
