#include INGOT_LEVEL_HEADER
#include "rows/take_columns_kernel.h"

INGOT_KERNEL("take_columns.f32." INGOT_LEVEL, TakeColumnsArgs, ingot::take_columns)
