#include "matmul_kernel.h"
#include "matmul_tiles.h"
#include "simd_emulated.h"
#include "tile_emulated.h"

INGOT_KERNEL("matmul.f32.avx512emu", MatmulArgs, (ingot::matmul<ingot::SimdEmulated, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16.avx512emu", MatmulArgs, (ingot::matmul<ingot::SimdEmulated, ingot::FloatWeight<ingot::PanelBf16>>))
INGOT_KERNEL("matmul.bf16.amxemu", MatmulArgs, (ingot::matmul_tiles<ingot::SimdEmulated, ingot::TilesEmulated>),
             ingot::matmul_tiles_scratch)
