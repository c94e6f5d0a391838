#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_tiles.h"

INGOT_KERNEL("matmul.w4ta8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W4t<false>>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4tsa8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W4t<true>>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w8ta8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W8t<false>>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w8tsa8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W8t<true>>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w2ta8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W2t>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w3ta8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, ingot::W3t>), ingot::matmul_int8_scratch)
