#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_tiles.h"

INGOT_KERNEL("matmul.w4ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, false>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4tsa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_group_tiles<ingot::Int8, ingot::TileUnit, true>),
             ingot::matmul_int8_scratch)
