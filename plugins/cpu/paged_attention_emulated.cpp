#include "paged_attention_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("paged_attention.f32.avx512emu", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdEmulated, float>),
             (ingot::paged_attention_scratch<ingot::SimdEmulated, float>))
INGOT_KERNEL("paged_attention.bf16.avx512emu", PagedAttentionArgs,
             (ingot::paged_attention<ingot::SimdEmulated, uint16_t>),
             (ingot::paged_attention_scratch<ingot::SimdEmulated, uint16_t>))
INGOT_KERNEL("paged_attention.int8.avx512emu", PagedAttentionArgs,
             (ingot::paged_attention<ingot::SimdEmulated, int8_t>),
             (ingot::paged_attention_scratch<ingot::SimdEmulated, int8_t>))
