#include INGOT_LEVEL_HEADER
#include "streams/streams_kernel.h"

INGOT_KERNEL("mix_streams.f32." INGOT_LEVEL, MixStreamsArgs, ingot::mix_streams<ingot::Simd>)
INGOT_KERNEL("add_to_streams.f32." INGOT_LEVEL, AddToStreamsArgs, ingot::add_to_streams<ingot::Simd>)
INGOT_KERNEL("match_magnitude.f32." INGOT_LEVEL, MatchMagnitudeArgs, ingot::match_magnitude<ingot::Simd>)
INGOT_KERNEL("cut_below.f32." INGOT_LEVEL, CutBelowArgs, ingot::cut_below<ingot::Simd>)
