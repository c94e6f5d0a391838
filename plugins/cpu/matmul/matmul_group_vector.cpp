#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_kernel.h"

INGOT_KERNEL("matmul.w4t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W4t<false>>>))
INGOT_KERNEL("matmul.w4ts." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W4t<true>>>))
INGOT_KERNEL("matmul.w8t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W8t<false>>>))
INGOT_KERNEL("matmul.w8ts." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W8t<true>>>))
INGOT_KERNEL("matmul.w2t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W2t>>))
INGOT_KERNEL("matmul.w3t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W3t>>))
