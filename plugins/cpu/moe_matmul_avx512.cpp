#include "moe_matmul_kernel.h"
#include "simd_avx512.h"

namespace ingot {
using F32 = VectorProduct<SimdAvx512, FloatWeight<PanelF32>>;
using Bf16 = VectorProduct<SimdAvx512, Bf16Weight>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f32.avx512", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx512, ingot::F32>))
INGOT_KERNEL("moe_gate_up.bf16.avx512", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx512, ingot::Bf16>))
INGOT_KERNEL("moe_down.f32.avx512", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx512, ingot::F32>))
INGOT_KERNEL("moe_down.bf16.avx512", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx512, ingot::Bf16>))
