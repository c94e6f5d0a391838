#include INGOT_LEVEL_HEADER
#include "moe/head_matmul_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
using F32 = VectorProduct<Simd, FloatWeight<PanelF32>>;
using Bf16 = VectorProduct<Simd, Bf16Weight>;
}  // namespace ingot

INGOT_KERNEL("head_matmul.f32." INGOT_LEVEL, HeadMatmulArgs, (ingot::head_matmul<ingot::Simd, ingot::F32>))
INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs, (ingot::head_matmul<ingot::Simd, ingot::Bf16>))
