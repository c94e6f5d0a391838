#include INGOT_LEVEL_HEADER
#include "matmul/matmul_unit_tiles.h"

INGOT_KERNEL("matmul.w4ksa8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_unit_tiles<ingot::Int8, ingot::TileUnit, ingot::W4ks>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w6ka8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_unit_tiles<ingot::Int8, ingot::TileUnit, ingot::W6k>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w5ksa8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_unit_tiles<ingot::Int8, ingot::TileUnit, ingot::W5ks>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w3ka8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_unit_tiles<ingot::Int8, ingot::TileUnit, ingot::W3k>), ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w2ksa8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_unit_tiles<ingot::Int8, ingot::TileUnit, ingot::W2ks>), ingot::matmul_int8_scratch)
