#include INGOT_LEVEL_HEADER
#include "isa/by_tables.h"
#include "matmul/matmul_f8_pairs_kernel.h"

namespace ingot {
namespace {
void matmul_f8_pairs(const MatmulArgs& args, const Team& team) {
  by_tables<Pairs, TablePairs>([&]<typename S>() { matmul_pairs<S, F8PairsWeight>(args, team); });
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_f8_pairs, ingot::matmul_pairs_scratch)
