#include INGOT_LEVEL_HEADER
#include "attention/rope_table_kernel.h"

INGOT_KERNEL("rope_table.f32." INGOT_LEVEL, RopeTableArgs, ingot::rope_table)
