#include "moe_route_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("moe_route.f32.avx2", MoeRouteArgs, ingot::moe_route<ingot::SimdAvx2>)
