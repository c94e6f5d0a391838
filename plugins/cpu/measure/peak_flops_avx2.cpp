#include "isa/int8_avx2.h"
#include "measure/peak_flops_loops.h"

namespace ingot {

const PeakLoop kPeakF32Avx2{"f32.avx2", kF32Operations<SimdAvx2, 6>, peak_f32<SimdAvx2, 6>};
const PeakLoop kPeakInt8Avx2{"int8.avx2", kInt8Operations<Int8Avx2, 5>, peak_int8<Int8Avx2, 5>};

}  // namespace ingot
