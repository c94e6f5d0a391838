// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
using W2TWeight = GroupedPairsWeight<W2t>;
using W3TWeight = GroupedPairsWeight<W3t>;
using W4TWeight = GroupedPairsWeight<W4t<false>>;
using W4TSWeight = GroupedPairsWeight<W4t<true>>;
using W8TWeight = GroupedPairsWeight<W8t<false>>;
using W8TSWeight = GroupedPairsWeight<W8t<true>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w2t." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W2TWeight>,
             ingot::matmul_pairs_scratch<ingot::W2TWeight>)
INGOT_KERNEL("moe_gate_up.w2t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W2TWeight>)
INGOT_KERNEL("moe_down.w2t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W2TWeight>)
INGOT_KERNEL("matmul.w3t." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W3TWeight>,
             ingot::matmul_pairs_scratch<ingot::W3TWeight>)
INGOT_KERNEL("moe_gate_up.w3t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W3TWeight>)
INGOT_KERNEL("moe_down.w3t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W3TWeight>)
INGOT_KERNEL("matmul.w4t." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W4TWeight>,
             ingot::matmul_pairs_scratch<ingot::W4TWeight>)
INGOT_KERNEL("moe_gate_up.w4t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W4TWeight>)
INGOT_KERNEL("moe_down.w4t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W4TWeight>)
INGOT_KERNEL("matmul.w4ts." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W4TSWeight>,
             ingot::matmul_pairs_scratch<ingot::W4TSWeight>)
INGOT_KERNEL("moe_gate_up.w4ts." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W4TSWeight>)
INGOT_KERNEL("moe_down.w4ts." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W4TSWeight>)
INGOT_KERNEL("matmul.w8t." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W8TWeight>,
             ingot::matmul_pairs_scratch<ingot::W8TWeight>)
INGOT_KERNEL("moe_gate_up.w8t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W8TWeight>)
INGOT_KERNEL("moe_down.w8t." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W8TWeight>)
INGOT_KERNEL("matmul.w8ts." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W8TSWeight>,
             ingot::matmul_pairs_scratch<ingot::W8TSWeight>)
INGOT_KERNEL("moe_gate_up.w8ts." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W8TSWeight>)
INGOT_KERNEL("moe_down.w8ts." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W8TSWeight>)
