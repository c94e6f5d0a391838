#include INGOT_LEVEL_HEADER
#include "isa/by_tables.h"
#include "matmul/matmul_kernel.h"
#include "matmul/quantised.h"

namespace ingot {
namespace {
void matmul_f8(const MatmulArgs& args, const Team& team) {
  by_tables<Int8, TableInt8>([&]<typename I>() { matmul<I, F8Weight>(args, team); });
}
}  // namespace
}  // namespace ingot

INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W8>>))
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W4>>))
INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, ingot::matmul_f8)
