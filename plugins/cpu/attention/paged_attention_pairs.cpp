#include INGOT_LEVEL_HEADER
#include "attention/paged_attention_pairs_kernel.h"

INGOT_KERNEL("paged_attention.bf16." INGOT_LEVEL, PagedAttentionArgs,
             (ingot::paged_attention_pairs<ingot::Pairs, uint16_t>),
             (ingot::paged_attention_pairs_scratch<ingot::Pairs, uint16_t>))
INGOT_KERNEL("paged_attention.int8." INGOT_LEVEL, PagedAttentionArgs,
             (ingot::paged_attention_codes<ingot::Pairs, ingot::TablePairs, int8_t>),
             (ingot::paged_attention_pairs_scratch<ingot::Pairs, int8_t>))
INGOT_KERNEL("paged_attention.f8." INGOT_LEVEL, PagedAttentionArgs,
             (ingot::paged_attention_codes<ingot::Pairs, ingot::TablePairs, uint8_t>),
             (ingot::paged_attention_pairs_scratch<ingot::Pairs, uint8_t>))
