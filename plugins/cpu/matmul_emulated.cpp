#include "matmul_kernel.h"
#include "matmul_pairs_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("matmul.f32.avx512emu", MatmulArgs,
             (ingot::matmul<ingot::SimdEmulated, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16.avx512emu", MatmulArgs, (ingot::matmul<ingot::SimdEmulated, ingot::Bf16Weight>))
INGOT_KERNEL("matmul.bf16.avx512bf16emu", MatmulArgs, ingot::matmul_pairs<ingot::PairsEmulated>,
             ingot::matmul_pairs_scratch)
