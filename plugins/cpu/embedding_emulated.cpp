#include "embedding_kernel.h"
#include "int8_emulated.h"

INGOT_KERNEL("embedding.f32.avx512emu", EmbeddingArgs,
             (ingot::embedding<ingot::SimdEmulated, ingot::PlainTable, float>))
INGOT_KERNEL("embedding.bf16.avx512emu", EmbeddingArgs,
             (ingot::embedding<ingot::SimdEmulated, ingot::PlainTable, uint16_t>))
INGOT_KERNEL("embedding.w8.avx512emu", EmbeddingArgs,
             (ingot::embedding<ingot::Int8Emulated, ingot::W8Table, std::byte>))
