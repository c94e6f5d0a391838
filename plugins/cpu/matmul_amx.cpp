#include "matmul_tiles.h"
#include "simd_avx512.h"
#include "tile_amx.h"

INGOT_KERNEL("matmul.bf16.amx", MatmulArgs, (ingot::matmul_tiles<ingot::SimdAvx512, ingot::TilesAmx>),
             ingot::matmul_tiles_scratch)
