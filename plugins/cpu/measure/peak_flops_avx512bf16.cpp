#include "isa/simd_avx512bf16.h"
#include "measure/peak_flops_loops.h"

namespace ingot {

const PeakLoop kPeakBf16Avx512{"bf16.avx512bf16", 2 * kF32Operations<PairsAvx512, 12>, peak_f32<PairsAvx512, 12, true>};

}  // namespace ingot
