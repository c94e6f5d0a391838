// Products of experts and all others: they share their tiles, which take long to compile.
#include INGOT_LEVEL_HEADER
#include "matmul/matmul_int8_kernel.h"
#include "moe/moe_matmul_int8_kernel.h"

namespace ingot {
using W8A8Product = ByteProduct<Int8, W8>;
template <int64_t kRun>
using W4A8Product =
    std::conditional_t<Int8::kMaxCodeRows<kRun> == INT64_MAX, CodeProduct<Int8, kRun>, CodeOrByteProduct<Int8, kRun>>;
}  // namespace ingot

INGOT_KERNEL("matmul.w8a8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_bytes<ingot::Int8, ingot::W8>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4a8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_w4a8<ingot::Int8>), ingot::matmul_int8_scratch)
INGOT_KERNEL("moe_gate_up.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.w4a8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_codes<ingot::Int8, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down_codes<ingot::Int8, ingot::W4A8Product>))
