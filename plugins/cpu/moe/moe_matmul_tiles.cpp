// Products of experts and of heads: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_tiles.h"

#include "moe/head_matmul_kernel.h"

namespace ingot {
using Bf16Product = Bf16TileProduct<PlainSimd, TileUnit>;
using W8Product = NarrowedTileProduct<PlainInt8, TileUnit, W8>;
using W8A8Product = Int8TileProduct<PlainInt8, TileUnit, W8>;
using F8Product = TileProduct<PlainInt8, TileUnit, Bf16Rows<PlainInt8>, F8Tiles<PlainSimd, PlainInt8, F8Pairs>>;
using W4Product = NarrowedTileProduct<PlainInt8, TileUnit, W4>;
template <int64_t kRun>
using W4A8Product = CodeOrTileProduct<PlainInt8, TileUnit, kRun>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::PlainSimd, ingot::Bf16Product>))
INGOT_KERNEL("moe_down.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::PlainSimd, ingot::Bf16Product>))
INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::PlainInt8, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::PlainInt8, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::PlainInt8, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::PlainInt8, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::PlainInt8, ingot::F8Product>))
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::PlainInt8, ingot::F8Product>))
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::PlainInt8, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::PlainInt8, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.w4a8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_codes<ingot::PlainInt8, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down_codes<ingot::PlainInt8, ingot::W4A8Product>))
INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs,
             (ingot::head_matmul<ingot::PlainSimd, ingot::Bf16Product>))
