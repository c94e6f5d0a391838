#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_kernel.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
template <bool kShift>
using FloatProduct = VectorProduct<Int8, GroupedWeight<Int8, kShift>>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w4t." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<false>>))
INGOT_KERNEL("moe_down.w4t." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::FloatProduct<false>>))
INGOT_KERNEL("moe_gate_up.w4ts." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::FloatProduct<true>>))
INGOT_KERNEL("moe_down.w4ts." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::FloatProduct<true>>))
