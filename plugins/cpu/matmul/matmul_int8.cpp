#include INGOT_LEVEL_HEADER
#include "matmul/matmul_int8_kernel.h"

INGOT_KERNEL("matmul.w8a8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_bytes<ingot::Int8, ingot::W8>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4a8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_w4a8<ingot::Int8>), ingot::matmul_int8_scratch)
