#include "int8_avx512.h"
#include "moe_matmul_int8_kernel.h"
#include "moe_matmul_kernel.h"

namespace ingot {
using W8Product = VectorProduct<Int8Avx512, QuantisedWeight<Int8Avx512, W8>>;
using W4Product = VectorProduct<Int8Avx512, QuantisedWeight<Int8Avx512, W4>>;
using W8A8Product = ByteProduct<Int8Avx512, W8>;
template <int64_t kRun>
using W4A8Product = CodeOrByteProduct<Int8Avx512, kRun>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.w8.avx512", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W8Product>))
INGOT_KERNEL("moe_down.w8.avx512", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W8Product>))
INGOT_KERNEL("moe_gate_up.w8a8.avx512", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W8A8Product>))
INGOT_KERNEL("moe_down.w8a8.avx512", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W8A8Product>))
INGOT_KERNEL("moe_gate_up.w4.avx512", MoeMatmulArgs, (ingot::moe_gate_up<ingot::Int8Avx512, ingot::W4Product>))
INGOT_KERNEL("moe_down.w4.avx512", MoeMatmulArgs, (ingot::moe_down<ingot::Int8Avx512, ingot::W4Product>))
INGOT_KERNEL("moe_gate_up.w4a8.avx512", MoeMatmulArgs,
             (ingot::moe_gate_up_codes<ingot::Int8Avx512, ingot::W4A8Product>))
INGOT_KERNEL("moe_down.w4a8.avx512", MoeMatmulArgs, (ingot::moe_down_codes<ingot::Int8Avx512, ingot::W4A8Product>))
