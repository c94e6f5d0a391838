#include INGOT_LEVEL_HEADER
#include "recurrent/linear_attention_kernel.h"

INGOT_KERNEL("linear_attention.f32." INGOT_LEVEL, LinearAttentionArgs, ingot::linear_attention<ingot::Simd>)
