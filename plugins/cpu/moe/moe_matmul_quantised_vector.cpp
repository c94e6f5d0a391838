#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_kernel.h"

namespace ingot {
using W8Product = VectorProduct<Int8, QuantisedWeight<Int8, W8>>;
using W4Product = VectorProduct<Int8, QuantisedWeight<Int8, W4>>;
namespace {
template <typename I>
using F8Product = VectorProduct<I, F8Weight>;

// f<I>() of the way to widen numbers that this CPU is faster with, see matmul_f8.
template <typename F>
void widening_f8(F f) {
  if (!std::is_same_v<Int8, TableInt8> && permutes_bytes) return f.template operator()<TableInt8>();
  f.template operator()<Int8>();
}
void moe_gate_up_f8(const MoeMatmulArgs& args, const Team& team) {
  widening_f8([&]<typename I>() { moe_gate_up<I, F8Product<I>>(args, team); });
}
void moe_down_f8(const MoeMatmulArgs& args, const Team& team) {
  widening_f8([&]<typename I>() { moe_down<I, F8Product<I>>(args, team); });
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_f8)
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_f8)
