// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::F8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::F8PairsWeight>)
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::F8PairsWeight>)
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::F8PairsWeight>)
INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::W8PairsWeight>)
INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W8PairsWeight>)
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W8PairsWeight>)
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W4PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::W4PairsWeight>)
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_code_pairs<ingot::W4PairsWeight>)
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_code_pairs<ingot::W4PairsWeight>)
