#include "embedding_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("embedding.f32.avx512emu", EmbeddingArgs, (ingot::embedding<ingot::SimdEmulated, float>))
INGOT_KERNEL("embedding.bf16.avx512emu", EmbeddingArgs, (ingot::embedding<ingot::SimdEmulated, uint16_t>))
