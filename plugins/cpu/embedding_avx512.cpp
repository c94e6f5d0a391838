#include "embedding_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("embedding.f32.avx512", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx512, float>))
INGOT_KERNEL("embedding.bf16.avx512", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx512, uint16_t>))
