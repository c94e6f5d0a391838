#include INGOT_LEVEL_HEADER
#include "rows/join_columns_kernel.h"

INGOT_KERNEL("join_columns.f32." INGOT_LEVEL, JoinColumnsArgs, ingot::join_columns)
