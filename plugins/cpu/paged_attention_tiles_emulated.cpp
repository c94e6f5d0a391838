#include "paged_attention_tiles.h"
#include "simd_emulated.h"
#include "tile_emulated.h"

INGOT_KERNEL("paged_attention.bf16.amxemu", PagedAttentionArgs,
             (ingot::paged_attention_tiles<ingot::SimdEmulated, ingot::TilesEmulated>),
             (ingot::paged_attention_tiles_scratch<ingot::SimdEmulated, ingot::TilesEmulated>))
