#include "elementwise_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("activation.f32.avx512emu", ElementwiseArgs, ingot::activation<ingot::SimdEmulated>)
INGOT_KERNEL("add.f32.avx512emu", ElementwiseArgs, ingot::add<ingot::SimdEmulated>)
INGOT_KERNEL("softcap.f32.avx512emu", ElementwiseArgs, ingot::softcap<ingot::SimdEmulated>)
