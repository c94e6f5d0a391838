// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_kernel.h"
#include "moe/moe_matmul_int8_kernel.h"

namespace ingot {
template <bool kShift>
using RoundedProduct = Int8Product<Int8, W4t<kShift>, GroupProducts<Int8, kShift>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w4ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, false>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4tsa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, true>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w4ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::RoundedProduct<false>>))
INGOT_KERNEL("moe_down.w4ta8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::RoundedProduct<false>>))
INGOT_KERNEL("moe_gate_up.w4tsa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::RoundedProduct<true>>))
INGOT_KERNEL("moe_down.w4tsa8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::RoundedProduct<true>>))
