#include INGOT_LEVEL_HEADER
#include "rows/embedding_kernel.h"

INGOT_KERNEL("embedding.f32." INGOT_LEVEL, EmbeddingArgs, (ingot::embedding<ingot::Simd, ingot::PlainTable, float>))
INGOT_KERNEL("embedding.bf16." INGOT_LEVEL, EmbeddingArgs, (ingot::embedding<ingot::Simd, ingot::PlainTable, uint16_t>))
INGOT_KERNEL("embedding.w8." INGOT_LEVEL, EmbeddingArgs, (ingot::embedding<ingot::Int8, ingot::W8Table, std::byte>))
