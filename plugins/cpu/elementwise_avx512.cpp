#include "elementwise_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("activation.f32.avx512", ElementwiseArgs, ingot::activation<ingot::SimdAvx512>)
INGOT_KERNEL("add.f32.avx512", ElementwiseArgs, ingot::add<ingot::SimdAvx512>)
INGOT_KERNEL("softcap.f32.avx512", ElementwiseArgs, ingot::softcap<ingot::SimdAvx512>)
