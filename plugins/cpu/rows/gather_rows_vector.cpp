#include INGOT_LEVEL_HEADER
#include "rows/gather_rows_kernel.h"

INGOT_KERNEL("gather_rows.f32." INGOT_LEVEL, GatherRowsArgs, ingot::gather_rows)
