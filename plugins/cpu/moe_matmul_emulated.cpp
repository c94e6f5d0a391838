#include "moe_matmul_kernel.h"
#include "moe_matmul_tiles.h"
#include "simd_emulated.h"
#include "tile_emulated.h"

namespace ingot {
using F32 = VectorProduct<SimdEmulated, PanelF32>;
using Bf16 = VectorProduct<SimdEmulated, PanelBf16>;
using Bf16Product = TileProduct<SimdEmulated, TilesEmulated>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f32.avx512emu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::F32>))
INGOT_KERNEL("moe_gate_up.bf16.avx512emu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::Bf16>))
INGOT_KERNEL("moe_gate_up.bf16.amxemu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::Bf16Product>))
INGOT_KERNEL("moe_down.f32.avx512emu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::F32>))
INGOT_KERNEL("moe_down.bf16.avx512emu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::Bf16>))
INGOT_KERNEL("moe_down.bf16.amxemu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::Bf16Product>))
