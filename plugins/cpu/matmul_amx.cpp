#include "int8_avx512.h"
#include "matmul_tiles.h"
#include "simd_amx.h"
#include "tile_amx.h"

INGOT_KERNEL(
    "matmul.bf16.amx", MatmulArgs,
    (ingot::matmul_tiles<ingot::SimdAmx, ingot::TilesAmx, ingot::Bf16Rows<ingot::SimdAvx512>, ingot::Bf16Tiles>),
    (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::SimdAvx512>>))
INGOT_KERNEL("matmul.w8.amx", MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8Amx, ingot::TilesAmx, ingot::Bf16Rows<ingot::Int8Amx>,
                                  ingot::NarrowedTiles<ingot::Int8Amx, ingot::W8>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8Amx>>))
INGOT_KERNEL("matmul.w8a8.amx", MatmulArgs, (ingot::matmul_int8_tiles<ingot::Int8Amx, ingot::TilesAmx, ingot::W8>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8Amx>))
INGOT_KERNEL("matmul.w4.amx", MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8Amx, ingot::TilesAmx, ingot::Bf16Rows<ingot::Int8Amx>,
                                  ingot::NarrowedTiles<ingot::Int8Amx, ingot::W4>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8Amx>>))
INGOT_KERNEL("matmul.w4a8.amx", MatmulArgs, (ingot::matmul_int8_tiles<ingot::Int8Amx, ingot::TilesAmx, ingot::W4>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8Amx>))
