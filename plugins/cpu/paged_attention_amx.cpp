#include "paged_attention_tiles.h"
#include "simd_avx512.h"
#include "tile_amx.h"

INGOT_KERNEL("paged_attention.bf16.amx", PagedAttentionArgs,
             (ingot::paged_attention_tiles<ingot::SimdAvx512, ingot::TilesAmx>),
             (ingot::paged_attention_tiles_scratch<ingot::SimdAvx512, ingot::TilesAmx>))
