#include "matmul_pairs_kernel.h"
#include "simd_avx512bf16.h"

INGOT_KERNEL("matmul.bf16.avx512bf16", MatmulArgs, ingot::matmul_pairs<ingot::PairsAvx512>, ingot::matmul_pairs_scratch)
