// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_unit_kernel.h"

INGOT_KERNEL("matmul.w4ksa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W4ks>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w4ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W4ks>>))
INGOT_KERNEL("moe_down.w4ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W4ks>>))
INGOT_KERNEL("matmul.w6ka8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W6k>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w6ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k>>))
INGOT_KERNEL("moe_down.w6ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W6k>>))
INGOT_KERNEL("matmul.w5ksa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W5ks>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w5ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W5ks>>))
INGOT_KERNEL("moe_down.w5ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W5ks>>))
INGOT_KERNEL("matmul.w3ka8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W3k>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w3ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W3k>>))
INGOT_KERNEL("moe_down.w3ka8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W3k>>))
INGOT_KERNEL("matmul.w2ksa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_units<ingot::Int8, ingot::W2ks>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w2ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W2ks>>))
INGOT_KERNEL("moe_down.w2ksa8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::UnitProduct<ingot::Int8, ingot::W2ks>>))
