#include INGOT_LEVEL_HEADER
#include "matmul/matmul_kernel.h"

INGOT_KERNEL("matmul.f32." INGOT_LEVEL, MatmulArgs, (ingot::matmul<ingot::Simd, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, (ingot::matmul<ingot::Simd, ingot::Bf16Weight>))
