#include INGOT_LEVEL_HEADER
#include "isa/by_tables.h"
#include "matmul/matmul_code_pairs_kernel.h"

namespace ingot {
namespace {
template <typename Weight>
void matmul_code_pairs(const MatmulArgs& args, const Team& team) {
  by_tables<Pairs, TablePairs>([&]<typename S>() { matmul_pairs<S, Weight>(args, team); });
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::F8PairsWeight>,
             ingot::matmul_pairs_scratch)
INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs, ingot::matmul_code_pairs<ingot::W8PairsWeight>,
             ingot::matmul_pairs_scratch)
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs, (ingot::matmul_pairs<ingot::Pairs, ingot::W4PairsWeight>),
             ingot::matmul_pairs_scratch)
