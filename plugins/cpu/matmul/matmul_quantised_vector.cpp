#include INGOT_LEVEL_HEADER
#include "matmul/matmul_kernel.h"
#include "matmul/quantised.h"

INGOT_KERNEL("matmul.w8." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W8>>))
INGOT_KERNEL("matmul.w4." INGOT_LEVEL, MatmulArgs,
             (ingot::matmul<ingot::Int8, ingot::QuantisedWeight<ingot::Int8, ingot::W4>>))
INGOT_KERNEL("matmul.f8." INGOT_LEVEL, MatmulArgs, (ingot::matmul_f8<ingot::Int8, ingot::TableInt8>))
