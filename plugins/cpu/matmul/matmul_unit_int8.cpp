// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_unit_kernel.h"

INGOT_KERNEL("matmul.w4ksa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W4ks>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w4ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W4ks>>))
INGOT_KERNEL("moe_down.w4ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W4ks>>))
INGOT_KERNEL("matmul.w6ka8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W6k<false>>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w6ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k<false>>>))
INGOT_KERNEL("moe_down.w6ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k<false>>>))
INGOT_KERNEL("matmul.w6ksa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W6k<true>>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w6ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k<true>>>))
INGOT_KERNEL("moe_down.w6ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k<true>>>))
