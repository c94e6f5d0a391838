#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"

namespace ingot {
using Product = PairsProduct<Pairs>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Pairs, ingot::Product>))
INGOT_KERNEL("moe_down.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Pairs, ingot::Product>))
