#include "moe_route_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("moe_route.f32.avx512", MoeRouteArgs, ingot::moe_route<ingot::SimdAvx512>)
