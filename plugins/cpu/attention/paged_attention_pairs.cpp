#include INGOT_LEVEL_HEADER
#include "attention/paged_attention_pairs_kernel.h"

INGOT_KERNEL("paged_attention.bf16." INGOT_LEVEL, PagedAttentionArgs, ingot::paged_attention_pairs<ingot::Pairs>,
             ingot::paged_attention_pairs_scratch<ingot::Pairs>)
