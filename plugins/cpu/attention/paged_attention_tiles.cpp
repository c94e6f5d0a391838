#include INGOT_LEVEL_HEADER
#include "attention/paged_attention_tiles.h"

INGOT_KERNEL("paged_attention.bf16." INGOT_LEVEL, PagedAttentionArgs,
             (ingot::paged_attention_tiles<ingot::Simd, ingot::TileUnit>),
             (ingot::paged_attention_tiles_scratch<ingot::Simd, ingot::TileUnit>))
