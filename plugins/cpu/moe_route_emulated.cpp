#include "moe_route_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("moe_route.f32.avx512emu", MoeRouteArgs, ingot::moe_route<ingot::SimdEmulated>)
