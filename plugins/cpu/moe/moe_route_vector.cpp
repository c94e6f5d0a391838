#include INGOT_LEVEL_HEADER
#include "moe/moe_route_kernel.h"

INGOT_KERNEL("moe_route.f32." INGOT_LEVEL, MoeRouteArgs, ingot::moe_route<ingot::Simd>)
