#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"

INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::PairsWeight>),
             ingot::matmul_pairs_scratch)
INGOT_KERNEL("matmul.bf16c." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_pairs<ingot::Pairs, ingot::CompressedWeight<ingot::Pairs>>), ingot::matmul_pairs_scratch)
