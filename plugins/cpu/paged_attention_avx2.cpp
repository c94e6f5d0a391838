#include "paged_attention_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("paged_attention.f32.avx2", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx2, float>),
             (ingot::paged_attention_scratch<ingot::SimdAvx2, float>))
INGOT_KERNEL("paged_attention.bf16.avx2", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx2, uint16_t>),
             (ingot::paged_attention_scratch<ingot::SimdAvx2, uint16_t>))
INGOT_KERNEL("paged_attention.int8.avx2", PagedAttentionArgs, (ingot::paged_attention<ingot::SimdAvx2, int8_t>),
             (ingot::paged_attention_scratch<ingot::SimdAvx2, int8_t>))
