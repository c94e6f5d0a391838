#include "matmul_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("matmul.f32.avx2", MatmulArgs, (ingot::matmul<ingot::SimdAvx2, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16.avx2", MatmulArgs, (ingot::matmul<ingot::SimdAvx2, ingot::Bf16Weight>))
