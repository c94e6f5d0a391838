#include "embedding_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("embedding.f32.avx2", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx2, float>))
INGOT_KERNEL("embedding.bf16.avx2", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx2, uint16_t>))
