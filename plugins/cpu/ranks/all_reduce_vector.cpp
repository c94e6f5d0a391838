#include INGOT_LEVEL_HEADER
#include "ranks/all_reduce_kernel.h"

INGOT_KERNEL("all_reduce.f32." INGOT_LEVEL, AllReduceArgs, ingot::all_reduce)
