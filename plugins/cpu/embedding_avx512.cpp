#include "embedding_kernel.h"
#include "int8_avx512.h"

INGOT_KERNEL("embedding.f32.avx512", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx512, ingot::PlainTable, float>))
INGOT_KERNEL("embedding.bf16.avx512", EmbeddingArgs, (ingot::embedding<ingot::SimdAvx512, ingot::PlainTable, uint16_t>))
INGOT_KERNEL("embedding.w8.avx512", EmbeddingArgs, (ingot::embedding<ingot::Int8Avx512, ingot::W8Table, std::byte>))
