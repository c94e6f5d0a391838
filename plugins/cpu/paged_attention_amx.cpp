#include "paged_attention_tiles.h"
#include "simd_amx.h"
#include "tile_amx.h"

INGOT_KERNEL("paged_attention.bf16.amx", PagedAttentionArgs,
             (ingot::paged_attention_tiles<ingot::SimdAmx, ingot::TilesAmx>),
             (ingot::paged_attention_tiles_scratch<ingot::SimdAmx, ingot::TilesAmx>))
