#include "matmul_pairs_kernel.h"
#include "simd_avx512bf16.h"

namespace ingot {
using Pairs = PairsProduct<PairsAvx512>;
}  // namespace ingot

INGOT_KERNEL("moe_gate_up.bf16.avx512bf16", MoeMatmulArgs, (ingot::moe_gate_up<ingot::PairsAvx512, ingot::Pairs>))
INGOT_KERNEL("moe_down.bf16.avx512bf16", MoeMatmulArgs, (ingot::moe_down<ingot::PairsAvx512, ingot::Pairs>))
