#include "int8_emulated.h"
#include "matmul_tiles.h"
#include "tile_emulated.h"

INGOT_KERNEL("matmul.bf16.amxemu", MatmulArgs,
             (ingot::matmul_tiles<ingot::SimdEmulated, ingot::TilesEmulated, ingot::Bf16Rows<ingot::SimdEmulated>,
                                  ingot::Bf16Tiles>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::SimdEmulated>>))
INGOT_KERNEL("matmul.w8.amxemu", MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8Emulated, ingot::TilesEmulated, ingot::Bf16Rows<ingot::Int8Emulated>,
                                  ingot::NarrowedTiles<ingot::Int8Emulated, ingot::W8>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8Emulated>>))
INGOT_KERNEL("matmul.w8a8.amxemu", MatmulArgs,
             (ingot::matmul_int8_tiles<ingot::Int8Emulated, ingot::TilesEmulated, ingot::W8>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8Emulated>))
INGOT_KERNEL("matmul.w4.amxemu", MatmulArgs,
             (ingot::matmul_tiles<ingot::Int8Emulated, ingot::TilesEmulated, ingot::Bf16Rows<ingot::Int8Emulated>,
                                  ingot::NarrowedTiles<ingot::Int8Emulated, ingot::W4>>),
             (ingot::matmul_tiles_scratch<ingot::Bf16Rows<ingot::Int8Emulated>>))
INGOT_KERNEL("matmul.w4a8.amxemu", MatmulArgs,
             (ingot::matmul_int8_tiles<ingot::Int8Emulated, ingot::TilesEmulated, ingot::W4>),
             (ingot::matmul_int8_tiles_scratch<ingot::Int8Emulated>))
