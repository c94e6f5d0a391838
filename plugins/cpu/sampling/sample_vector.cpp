#include INGOT_LEVEL_HEADER
#include "sampling/sample_kernel.h"

INGOT_KERNEL("sample.f32." INGOT_LEVEL, SampleArgs, ingot::sample<ingot::Simd>)
