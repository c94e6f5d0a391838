#include "moe_matmul_tiles.h"
#include "simd_avx512.h"
#include "tile_amx.h"

namespace ingot {
using Bf16Product = TileProduct<SimdAvx512, TilesAmx>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16.amx", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx512, ingot::Bf16Product>))
INGOT_KERNEL("moe_down.bf16.amx", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx512, ingot::Bf16Product>))
