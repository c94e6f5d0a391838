// Products of experts, of heads and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"
#include "moe/head_matmul_kernel.h"

namespace ingot {
using CompressedPairs = CompressedWeight<Pairs>;
using Product = PairsProduct<Pairs, PairsWeight>;
using CompressedProduct = PairsProduct<Pairs, CompressedWeight<Pairs>>;
}  // namespace ingot

INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::PairsWeight>),
             ingot::matmul_pairs_scratch<ingot::PairsWeight>)
INGOT_KERNEL("matmul.bf16c." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::CompressedPairs>),
             ingot::matmul_pairs_scratch<ingot::CompressedPairs>)
INGOT_KERNEL("moe_gate_up.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Pairs, ingot::Product>))
INGOT_KERNEL("moe_down.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Pairs, ingot::Product>))
INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs, (ingot::head_matmul<ingot::Pairs, ingot::Product>))
INGOT_KERNEL("moe_gate_up.bf16c." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Pairs, ingot::CompressedProduct>))
INGOT_KERNEL("moe_down.bf16c." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Pairs, ingot::CompressedProduct>))
