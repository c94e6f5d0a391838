#include INGOT_LEVEL_HEADER
#include "matmul/matmul_f8_pairs_kernel.h"

namespace ingot {
template <typename S>
using F8Product = PairsProduct<S, F8PairsWeight>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_by_tables<ingot::Pairs, ingot::TablePairs, ingot::F8Product>))
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_down_by_tables<ingot::Pairs, ingot::TablePairs, ingot::F8Product>))
