#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"

INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, ingot::matmul_pairs<ingot::Pairs>, ingot::matmul_pairs_scratch)
