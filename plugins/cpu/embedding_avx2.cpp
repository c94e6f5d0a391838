#include "embedding_kernel.h"
#include "int8_avx2.h"

INGOT_KERNEL("embedding.f32.avx2", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx2, ingot::PlainTable, float>))
INGOT_KERNEL("embedding.bf16.avx2", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx2, ingot::PlainTable, uint16_t>))
INGOT_KERNEL("embedding.w8.avx2", EmbeddingArgs, (ingot::embedding<ingot::Int8Avx2, ingot::W8Table, std::byte>))
