#include "elementwise_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("activation.f32.avx2", ElementwiseArgs, ingot::activation<ingot::SimdAvx2>)
INGOT_KERNEL("add.f32.avx2", ElementwiseArgs, ingot::add<ingot::SimdAvx2>)
INGOT_KERNEL("softcap.f32.avx2", ElementwiseArgs, ingot::softcap<ingot::SimdAvx2>)
