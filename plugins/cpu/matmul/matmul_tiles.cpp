#include INGOT_LEVEL_HEADER
#include "matmul/matmul_tiles.h"

INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_tiles<ingot::Simd, ingot::TileUnit, ingot::Bf16Rows<ingot::PlainSimd>, ingot::Bf16Tiles>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::PlainSimd>>))
INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8, ingot::TileUnit, ingot::Bf16Rows<ingot::Int8>,
                                  ingot::NarrowedTiles<ingot::Int8, ingot::W8>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8>>))
INGOT_KERNEL("matmul.w8a8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_int8_tiles<ingot::Int8, ingot::TileUnit, ingot::W8>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8>))
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8, ingot::TileUnit, ingot::Bf16Rows<ingot::Int8>,
                                  ingot::NarrowedTiles<ingot::Int8, ingot::W4>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8>>))
INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8, ingot::TileUnit, ingot::Bf16Rows<ingot::Int8>,
                                  ingot::F8Tiles<ingot::PlainSimd, ingot::Int8, ingot::F8Pairs>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8>>))
INGOT_KERNEL("matmul.w4a8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul_int8_tiles<ingot::Int8, ingot::TileUnit, ingot::W4>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8>))
