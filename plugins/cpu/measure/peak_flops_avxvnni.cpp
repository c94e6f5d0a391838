#include "isa/dots_avxvnni.h"
#include "isa/int8_dots.h"
#include "measure/peak_flops_loops.h"

namespace ingot {

using Mixed = Int8Dots<DotsAvxVnni>;

const PeakLoop kPeakInt8AvxVnni{"int8.avxvnni", kInt8Operations<Mixed, 6>, peak_int8<Mixed, 6>};

}  // namespace ingot
