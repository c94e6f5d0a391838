#include INGOT_LEVEL_HEADER
#include "matmul/matmul_unit_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
template <typename Format>
using FloatProduct = VectorProduct<Int8, UnitWeight<Int8, Format>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w4ks." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::UnitWeight<ingot::Int8, ingot::W4ks>>))
INGOT_KERNEL("moe_gate_up.w4ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W4ks>>))
INGOT_KERNEL("moe_down.w4ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W4ks>>))
INGOT_KERNEL("matmul.w6k." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::UnitWeight<ingot::Int8, ingot::W6k>>))
INGOT_KERNEL("moe_gate_up.w6k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W6k>>))
INGOT_KERNEL("moe_down.w6k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W6k>>))
INGOT_KERNEL("matmul.w5ks." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::UnitWeight<ingot::Int8, ingot::W5ks>>))
INGOT_KERNEL("moe_gate_up.w5ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W5ks>>))
INGOT_KERNEL("moe_down.w5ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W5ks>>))
INGOT_KERNEL("matmul.w3k." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::UnitWeight<ingot::Int8, ingot::W3k>>))
INGOT_KERNEL("moe_gate_up.w3k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W3k>>))
INGOT_KERNEL("moe_down.w3k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W3k>>))
INGOT_KERNEL("matmul.w2ks." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::UnitWeight<ingot::Int8, ingot::W2ks>>))
INGOT_KERNEL("moe_gate_up.w2ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<ingot::W2ks>>))
INGOT_KERNEL("moe_down.w2ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::FloatProduct<ingot::W2ks>>))
