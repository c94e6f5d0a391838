// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
template <typename Format>
using FloatProduct = VectorProduct<Int8, GroupedWeight<Int8, Format>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w4t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W4t<false>>>))
INGOT_KERNEL("matmul.w4ts." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W4t<true>>>))
INGOT_KERNEL("matmul.w8t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W8t<false>>>))
INGOT_KERNEL("matmul.w8ts." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W8t<true>>>))
INGOT_KERNEL("matmul.w2t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W2t>>))
INGOT_KERNEL("matmul.w3t." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::GroupedWeight<ingot::Int8, ingot::W3t>>))
INGOT_KERNEL("moe_gate_up.w4t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W4t<false>>>))
INGOT_KERNEL("moe_down.w4t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W4t<false>>>))
INGOT_KERNEL("moe_gate_up.w4ts." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W4t<true>>>))
INGOT_KERNEL("moe_down.w4ts." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W4t<true>>>))
INGOT_KERNEL("moe_gate_up.w8t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W8t<false>>>))
INGOT_KERNEL("moe_down.w8t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W8t<false>>>))
INGOT_KERNEL("moe_gate_up.w8ts." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W8t<true>>>))
INGOT_KERNEL("moe_down.w8ts." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W8t<true>>>))
INGOT_KERNEL("moe_gate_up.w2t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W2t>>))
INGOT_KERNEL("moe_down.w2t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W2t>>))
INGOT_KERNEL("moe_gate_up.w3t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W3t>>))
INGOT_KERNEL("moe_down.w3t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W3t>>))
