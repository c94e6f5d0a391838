#include INGOT_LEVEL_HEADER
#include "matmul/matmul_group_kernel.h"

INGOT_KERNEL("matmul.w4ta8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, false>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4tsa8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_groups<ingot::Int8, true>),
             ingot::matmul_int8_scratch)
