#include "int8_avx512.h"
#include "moe_matmul_tiles.h"
#include "tile_amx.h"

namespace ingot {
using Bf16Product = Bf16TileProduct<SimdAvx512, TilesAmx>;
using W8Product = NarrowedTileProduct<Int8Avx512, TilesAmx, W8>;
using W8A8Product = Int8TileProduct<Int8Avx512, TilesAmx, W8>;
using W4Product = NarrowedTileProduct<Int8Avx512, TilesAmx, W4>;
template <int64_t kRun>
using W4A8Product = CodeOrTileProduct<Int8Avx512, TilesAmx, kRun>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16.amx", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdAvx512, ingot::Bf16Product>))
INGOT_KERNEL("moe_down.bf16.amx", MoeMatmulArgs, (ingot::moe_down<ingot::SimdAvx512, ingot::Bf16Product>))
INGOT_KERNEL("moe_gate_up.w8.amx", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8.amx", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w8a8.amx", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8.amx", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.w4.amx", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4.amx", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.w4a8.amx", MoeMatmulArgs, (ingot::moe_gate_up_codes<ingot::Int8Avx512, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8.amx", MoeMatmulArgs, (ingot::moe_down_codes<ingot::Int8Avx512, ingot::W4A8Product>))
