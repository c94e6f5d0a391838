// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "isa/by_tables.h"
#include "matmul/matmul_kernel.h"
#include "matmul/quantised.h"
#include "moe/moe_matmul_kernel.h"

namespace ingot {
namespace {
void matmul_f8(const MatmulArgs& args, const Team& team) {
  by_tables<Int8, TableInt8>([&]<typename I>() { matmul<I, F8Weight>(args, team); });
}
void moe_gate_up_f8(const MoeMatmulArgs& args, const Team& team) {
  by_tables<Int8, TableInt8>([&]<typename I>() { moe_gate_up<I, VectorProduct<I, F8Weight>>(args, team); });
}
void moe_down_f8(const MoeMatmulArgs& args, const Team& team) {
  by_tables<Int8, TableInt8>([&]<typename I>() { moe_down<I, VectorProduct<I, F8Weight>>(args, team); });
}
}  // namespace
using W8Product = VectorProduct<Int8, QuantisedWeight<Int8, W8>>;
using W4Product = VectorProduct<Int8, QuantisedWeight<Int8, W4>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W8>>))
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W4>>))
INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_f8)
INGOT_KERNEL("moe_gate_up.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_gate_up_f8)
INGOT_KERNEL("moe_down.f8." INGOT_LEVEL, MoeMatmulArgs, ingot::moe_down_f8)
