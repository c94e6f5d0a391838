#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_by_tables<ingot::F8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::F8PairsWeight>)
INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs, ingot::matmul_by_tables<ingot::W8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::W8PairsWeight>)
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W4PairsWeight>),
             ingot::matmul_pairs_scratch<ingot::W4PairsWeight>)
