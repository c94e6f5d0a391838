#include "isa/dots_vex.h"
#include "isa/int8_dots.h"
#include "measure/peak_flops_loops.h"

namespace ingot {

using Mixed = Int8Dots<DotsAvxVnni>;

const PeakLoop kPeakInt8AvxVnni{"int8.avxvnni", kInt8Operations<Mixed, 6>, peak_int8<Mixed, 6>};
// Its two dot products are of one speed.
const PeakLoop kPeakInt8AvxVnniInt8{"int8.avxvnniint8", kInt8Operations<Mixed, 6>, peak_int8<Mixed, 6>};

}  // namespace ingot
