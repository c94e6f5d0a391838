#include "matmul_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("matmul.f32.avx512", MatmulArgs, (ingot::matmul<ingot::SimdAvx512, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16.avx512", MatmulArgs, (ingot::matmul<ingot::SimdAvx512, ingot::Bf16Weight>))
