#include INGOT_LEVEL_HEADER
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
template <typename S>
using W2KSProduct = PairsProduct<S, UnitPairsWeight<W2ks>>;
template <typename S>
using W3KProduct = PairsProduct<S, UnitPairsWeight<W3k>>;
template <typename S>
using W4KSProduct = PairsProduct<S, UnitPairsWeight<W4ks>>;
template <typename S>
using W5KSProduct = PairsProduct<S, UnitPairsWeight<W5ks>>;
template <typename S>
using W6KProduct = PairsProduct<S, UnitPairsWeight<W6k>>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w2ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Pairs, ingot::W2KSProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_down.w2ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Pairs, ingot::W2KSProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_gate_up.w3k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Pairs, ingot::W3KProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_down.w3k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Pairs, ingot::W3KProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_gate_up.w4ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up<ingot::Pairs, ingot::W4KSProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_down.w4ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down<ingot::Pairs, ingot::W4KSProduct<ingot::Pairs>>))
INGOT_KERNEL("moe_gate_up.w5ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W5KSProduct>))
INGOT_KERNEL("moe_down.w5ks." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W5KSProduct>))
INGOT_KERNEL("moe_gate_up.w6k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W6KProduct>))
INGOT_KERNEL("moe_down.w6k." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down_by_tables<ingot::Pairs, ingot::TablePairs, ingot::W6KProduct>))
