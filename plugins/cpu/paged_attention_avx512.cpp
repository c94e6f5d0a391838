#include "paged_attention_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("paged_attention.f32.avx512", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx512, float>),
             (ingot::paged_attention_scratch<ingot::SimdAvx512, float>))
INGOT_KERNEL("paged_attention.bf16.avx512", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx512, uint16_t>),
             (ingot::paged_attention_scratch<ingot::SimdAvx512, uint16_t>))
INGOT_KERNEL("paged_attention.int8.avx512", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx512, int8_t>),
             (ingot::paged_attention_scratch<ingot::SimdAvx512, int8_t>))
