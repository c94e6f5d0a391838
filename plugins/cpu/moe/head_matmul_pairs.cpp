#include INGOT_LEVEL_HEADER
#include "matmul/matmul_pairs_kernel.h"
#include "moe/head_matmul_kernel.h"

INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs,
             (ingot::head_matmul<ingot::Pairs, ingot::PairsProduct<ingot::Pairs>>))
