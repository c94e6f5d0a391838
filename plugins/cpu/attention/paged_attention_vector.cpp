#include INGOT_LEVEL_HEADER
#include "attention/paged_attention_kernel.h"

INGOT_KERNEL("paged_attention.f32." INGOT_LEVEL, PagedAttentionArgs, (ingot::paged_attention<ingot::Simd, float>),
             (ingot::paged_attention_scratch<ingot::Simd, float>))
INGOT_KERNEL("paged_attention.bf16." INGOT_LEVEL, PagedAttentionArgs, (ingot::paged_attention<ingot::Simd, uint16_t>),
             (ingot::paged_attention_scratch<ingot::Simd, uint16_t>))
INGOT_KERNEL("paged_attention.int8." INGOT_LEVEL, PagedAttentionArgs, (ingot::paged_attention<ingot::Simd, int8_t>),
             (ingot::paged_attention_scratch<ingot::Simd, int8_t>))
INGOT_KERNEL("paged_attention.f8." INGOT_LEVEL, PagedAttentionArgs, (ingot::paged_attention<ingot::Simd, uint8_t>),
             (ingot::paged_attention_scratch<ingot::Simd, uint8_t>))
