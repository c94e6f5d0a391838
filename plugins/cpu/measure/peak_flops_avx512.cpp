#include "isa/int8_avx512.h"
#include "measure/peak_flops_loops.h"

namespace ingot {

const PeakLoop kPeakF32Avx512{"f32.avx512", kF32Operations<SimdAvx512, 12>, peak_f32<SimdAvx512, 12>};
const PeakLoop kPeakInt8Avx512{"int8.avx512", kInt8Operations<Int8Avx512, 12>, peak_int8<Int8Avx512, 12>};

}  // namespace ingot
