#include INGOT_LEVEL_HEADER
#include "recurrent/causal_conv_kernel.h"

INGOT_KERNEL("causal_conv.f32." INGOT_LEVEL, CausalConvArgs, ingot::causal_conv<ingot::Simd>)
