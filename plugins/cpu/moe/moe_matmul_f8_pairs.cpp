#include INGOT_LEVEL_HEADER
#include "matmul/matmul_f8_pairs_kernel.h"

namespace ingot {
namespace {
template <typename S>
using F8Product = PairsProduct<S, F8PairsWeight>;

void moe_gate_up_f8_pairs(const MoeMatmulArgs& args, const Team& team) {
  widening_f8_pairs([&]<typename S>() { moe_gate_up<S, F8Product<S>>(args, team); });
}
void moe_down_f8_pairs(const MoeMatmulArgs& args, const Team& team) {
  widening_f8_pairs([&]<typename S>() { moe_down<S, F8Product<S>>(args, team); });
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_f8_pairs)
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_f8_pairs)
