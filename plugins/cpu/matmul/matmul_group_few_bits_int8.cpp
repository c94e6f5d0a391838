// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_group_kernel.h"

INGOT_KERNEL("matmul.w2ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, ingot::W2t>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w2ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W2t>>))
INGOT_KERNEL("moe_down.w2ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W2t>>))
INGOT_KERNEL("matmul.w3ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, ingot::W3t>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w3ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W3t>>))
INGOT_KERNEL("moe_down.w3ta8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Int8, ingot::GroupProduct<ingot::Int8, ingot::W3t>>))
