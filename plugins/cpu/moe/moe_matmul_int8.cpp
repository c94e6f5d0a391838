#include INGOT_LEVEL_HEADER
#include "moe/moe_matmul_int8_kernel.h"

namespace ingot {
using W8A8Product = ByteProduct<Int8, W8>;
template <int64_t kRun>
using W4A8Product = std::conditional_t<Int8::kUnpacksCodes, CodeOrByteProduct<Int8, kRun>, CodeProduct<Int8, kRun>>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down<ingot::Int8, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.w4a8." INGOT_LEVEL, MoeMatmulArgs,
             (ingot::moe_gate_up_codes<ingot::Int8, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8." INGOT_LEVEL, MoeMatmulArgs, (ingot::moe_down_codes<ingot::Int8, ingot::W4A8Product>))
