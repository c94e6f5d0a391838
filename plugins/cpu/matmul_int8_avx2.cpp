#include "int8_avx2.h"
#include "matmul_int8_kernel.h"
#include "matmul_kernel.h"

INGOT_KERNEL("matmul.w8.avx2", MatmulArgs,
             (ingot::matmul<ingot::Int8Avx2, ingot::QuantisedWeight<ingot::Int8Avx2, ingot::W8>>))
INGOT_KERNEL("matmul.w4.avx2", MatmulArgs,
             (ingot::matmul<ingot::Int8Avx2, ingot::QuantisedWeight<ingot::Int8Avx2, ingot::W4>>))
INGOT_KERNEL("matmul.w8a8.avx2", MatmulArgs, (ingot::matmul_bytes<ingot::Int8Avx2, ingot::W8>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4a8.avx2", MatmulArgs, (ingot::matmul_codes<ingot::Int8Avx2>), ingot::matmul_int8_scratch)
