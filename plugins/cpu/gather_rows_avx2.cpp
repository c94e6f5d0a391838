#include "gather_rows_kernel.h"

INGOT_KERNEL("gather_rows.f32.avx2", GatherRowsArgs, ingot::gather_rows)
