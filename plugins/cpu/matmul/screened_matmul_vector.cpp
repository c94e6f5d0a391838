#include INGOT_LEVEL_HEADER
#include "matmul/screened_matmul_kernel.h"

INGOT_KERNEL("screened_matmul.w8a8." INGOT_LEVEL, ScreenedMatmulArgs, ingot::screened_matmul<ingot::Int8>,
             ingot::screened_matmul_scratch)
