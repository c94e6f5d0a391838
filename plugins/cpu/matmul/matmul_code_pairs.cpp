// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
template <typename S>
using F8Product = PairsProduct<S, F8PairsWeight>;
template <typename S>
using W8Product = PairsProduct<S, W8PairsWeight>;
template <typename S>
using W4Product = PairsProduct<S, W4PairsWeight>;
}  // namespace ingot

INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_by_tables<ingot::F8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::F8PairsWeight>)
INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs, ingot::matmul_by_tables<ingot::W8PairsWeight>,
             ingot::matmul_pairs_scratch<ingot::W8PairsWeight>)
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W4PairsWeight>),
             ingot::matmul_pairs_scratch<ingot::W4PairsWeight>)
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_by_tables<ingot::Pairs, ingot::TablePairs, ingot::F8Product>))
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down_by_tables<ingot::Pairs, ingot::TablePairs, ingot::F8Product>))
INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Pairs, ingot::W4Product<ingot::Pairs>>))
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Pairs, ingot::W4Product<ingot::Pairs>>))
