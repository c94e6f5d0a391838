#include "rope_table_kernel.h"

INGOT_KERNEL("rope_table.f32.avx2", RopeTableArgs, ingot::rope_table)
