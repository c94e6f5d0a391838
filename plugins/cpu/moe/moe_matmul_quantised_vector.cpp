#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_kernel.h"

namespace ingot {
using W8Product = VectorProduct<Int8, QuantisedWeight<Int8, W8>>;
using W4Product = VectorProduct<Int8, QuantisedWeight<Int8, W4>>;
namespace {
template <typename I>
using F8Product = VectorProduct<I, F8Weight>;

// See matmul_f8.
void moe_gate_up_f8(const MoeMatmulArgs& args, const Team& team) {
  if (!std::is_same_v<Int8, TableInt8> && permutes_bytes)
    return moe_gate_up<TableInt8, F8Product<TableInt8>>(args, team);
  moe_gate_up<Int8, F8Product<Int8>>(args, team);
}
void moe_down_f8(const MoeMatmulArgs& args, const Team& team) {
  if (!std::is_same_v<Int8, TableInt8> && permutes_bytes) return moe_down<TableInt8, F8Product<TableInt8>>(args, team);
  moe_down<Int8, F8Product<Int8>>(args, team);
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_f8)
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_f8)
