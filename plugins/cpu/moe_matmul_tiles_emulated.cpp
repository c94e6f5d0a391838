#include "int8_emulated.h"
#include "moe_matmul_tiles.h"
#include "tile_emulated.h"

namespace ingot {
using Bf16Product = Bf16TileProduct<SimdEmulated, TilesEmulated>;
using W8Product = NarrowedTileProduct<Int8Emulated, TilesEmulated, W8>;
using W8A8Product = Int8TileProduct<Int8Emulated, TilesEmulated, W8>;
using W4Product = NarrowedTileProduct<Int8Emulated, TilesEmulated, W4>;
template <int64_t kRun>
using W4A8Product = CodeOrTileProduct<Int8Emulated, TilesEmulated, kRun>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16.amxemu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::SimdEmulated, ingot::Bf16Product>))
INGOT_KERNEL("moe_down.bf16.amxemu", MoeMatmulArgs, (ingot::moe_down<ingot::SimdEmulated, ingot::Bf16Product>))
INGOT_KERNEL("moe_gate_up.w8.amxemu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Emulated, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8.amxemu", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Emulated, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w8a8.amxemu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Emulated, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8.amxemu", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Emulated, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.w4.amxemu", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Emulated, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4.amxemu", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Emulated, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.w4a8.amxemu", MoeMatmulArgs,
             (ingot::moe_gate_up_codes<ingot::Int8Emulated, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8.amxemu", MoeMatmulArgs, (ingot::moe_down_codes<ingot::Int8Emulated, ingot::W4A8Product>))
