// Products of experts, of heads and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_kernel.h"
#include "moe/head_matmul_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
using F32 = VectorProduct<Simd, FloatWeight<PanelF32>>;
using Bf16 = VectorProduct<Simd, Bf16Weight>;
}  // namespace ingot

INGOT_KERNEL("matmul.f32." INGOT_LEVEL, MatmulArgs, (ingot::matmul<ingot::Simd, ingot::FloatWeight<ingot::PanelF32>>))
INGOT_KERNEL("matmul.bf16." INGOT_LEVEL, MatmulArgs, (ingot::matmul<ingot::Simd, ingot::Bf16Weight>))
INGOT_KERNEL("moe_gate_up.f32." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Simd, ingot::F32>))
INGOT_KERNEL("moe_gate_up.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Simd, ingot::Bf16>))
INGOT_KERNEL("moe_down.f32." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Simd, ingot::F32>))
INGOT_KERNEL("moe_down.bf16." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Simd, ingot::Bf16>))
INGOT_KERNEL("head_matmul.f32." INGOT_LEVEL, HeadMatmulArgs, (ingot::head_matmul<ingot::Simd, ingot::F32>))
INGOT_KERNEL("head_matmul.bf16." INGOT_LEVEL, HeadMatmulArgs, (ingot::head_matmul<ingot::Simd, ingot::Bf16>))
