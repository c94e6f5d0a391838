#include INGOT_LEVEL_HEADER
#include "moe/head_matmul_kernel.h"
#include "moe/moe_matmul_tiles.h"

namespace ingot {
using HeadProduct = Bf16TileProduct<PlainSimd, TileUnit>;
}  // namespace ingot

INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs,
             (ingot::head_matmul<ingot::PlainSimd, ingot::HeadProduct>))
