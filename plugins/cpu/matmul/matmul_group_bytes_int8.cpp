// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_group_kernel.h"

INGOT_KERNEL("matmul.w8ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, ingot::W8t<false>>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w8tsa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, ingot::W8t<true>>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w8ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W8t<false>>>))
INGOT_KERNEL("moe_down.w8ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W8t<false>>>))
INGOT_KERNEL("moe_gate_up.w8tsa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W8t<true>>>))
INGOT_KERNEL("moe_down.w8tsa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W8t<true>>>))
