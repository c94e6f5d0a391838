#include INGOT_LEVEL_HEADER
#include "ranks/all_gather_kernel.h"

INGOT_KERNEL("all_gather.f32." INGOT_LEVEL, AllGatherArgs, ingot::all_gather)
