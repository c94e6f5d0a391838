#include "int8_avx512.h"
#include "matmul_int8_kernel.h"
#include "matmul_kernel.h"

INGOT_KERNEL("matmul.w8.avx512", MatmulArgs,
             (ingot::matmul<ingot::Int8Avx512, ingot::QuantisedWeight<ingot::Int8Avx512, ingot::W8>>))
INGOT_KERNEL("matmul.w4.avx512", MatmulArgs,
             (ingot::matmul<ingot::Int8Avx512, ingot::QuantisedWeight<ingot::Int8Avx512, ingot::W4>>))
INGOT_KERNEL("matmul.w8a8.avx512", MatmulArgs, (ingot::matmul_bytes<ingot::Int8Avx512, ingot::W8>),
             ingot::matmul_int8_scratch)
INGOT_KERNEL("matmul.w4a8.avx512", MatmulArgs, (ingot::matmul_codes_or_bytes<ingot::Int8Avx512>),
             ingot::matmul_int8_scratch)
