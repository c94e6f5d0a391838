#include "matmul_pairs_kernel.h"
#include "moe_matmul_kernel.h"
#include "simd_emulated.h"

namespace ingot {
using F32 = VectorProduct<SimdEmulated, FloatWeight<PanelF32>>;
using Bf16 = VectorProduct<SimdEmulated, Bf16Weight>;
using Pairs = PairsProduct<PairsEmulated>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f32.avx512emu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::F32>))
INGOT_KERNEL("moe_gate_up.bf16.avx512emu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::Bf16>))
INGOT_KERNEL("moe_down.f32.avx512emu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::F32>))
INGOT_KERNEL("moe_down.bf16.avx512emu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::Bf16>))
INGOT_KERNEL("moe_gate_up.bf16.avx512bf16emu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::PairsEmulated, ingot::Pairs>))
INGOT_KERNEL("moe_down.bf16.avx512bf16emu", MoeMatmulArgs, (ingot::moe_down<ingot::PairsEmulated, ingot::Pairs>))
