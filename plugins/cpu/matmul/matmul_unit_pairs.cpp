// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
using W2KSWeight = UnitPairsWeight<W2ks>;
using W3KWeight = UnitPairsWeight<W3k>;
using W4KSWeight = UnitPairsWeight<W4ks>;
using W5KSWeight = UnitPairsWeight<W5ks>;
using W6KWeight = UnitPairsWeight<W6k>;
}  // namespace ingot

INGOT_KERNEL("matmul.w2ks." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W2KSWeight>,
             ingot::matmul_pairs_scratch<ingot::W2KSWeight>)
INGOT_KERNEL("moe_gate_up.w2ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W2KSWeight>)
INGOT_KERNEL("moe_down.w2ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W2KSWeight>)
INGOT_KERNEL("matmul.w3k." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W3KWeight>,
             ingot::matmul_pairs_scratch<ingot::W3KWeight>)
INGOT_KERNEL("moe_gate_up.w3k." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W3KWeight>)
INGOT_KERNEL("moe_down.w3k." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W3KWeight>)
INGOT_KERNEL("matmul.w4ks." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W4KSWeight>,
             ingot::matmul_pairs_scratch<ingot::W4KSWeight>)
INGOT_KERNEL("moe_gate_up.w4ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W4KSWeight>)
INGOT_KERNEL("moe_down.w4ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W4KSWeight>)
INGOT_KERNEL("matmul.w5ks." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W5KSWeight>,
             ingot::matmul_pairs_scratch<ingot::W5KSWeight>)
INGOT_KERNEL("moe_gate_up.w5ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W5KSWeight>)
INGOT_KERNEL("moe_down.w5ks." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W5KSWeight>)
INGOT_KERNEL("matmul.w6k." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W6KWeight>,
             ingot::matmul_pairs_scratch<ingot::W6KWeight>)
INGOT_KERNEL("moe_gate_up.w6k." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W6KWeight>)
INGOT_KERNEL("moe_down.w6k." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W6KWeight>)
