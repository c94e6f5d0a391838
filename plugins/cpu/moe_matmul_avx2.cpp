#include "moe_matmul_kernel.h"
#include "simd_avx2.h"

namespace ingot {
using F32 = VectorProduct<SimdAvx2, FloatWeight<PanelF32>>;
using Bf16 = VectorProduct<SimdAvx2, Bf16Weight>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f32.avx2", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx2, ingot::F32>))
INGOT_KERNEL("moe_gate_up.bf16.avx2", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx2, ingot::Bf16>))
INGOT_KERNEL("moe_down.f32.avx2", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx2, ingot::F32>))
INGOT_KERNEL("moe_down.bf16.avx2", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx2, ingot::Bf16>))
