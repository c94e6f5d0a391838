#include INGOT_LEVEL_HEADER
#include "rows/gather_columns_kernel.h"

INGOT_KERNEL("gather_columns.f32." INGOT_LEVEL, GatherColumnsArgs, ingot::gather_columns)
