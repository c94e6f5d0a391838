#include "gather_rows_kernel.h"

INGOT_KERNEL("gather_rows.f32.avx512emu", GatherRowsArgs, ingot::gather_rows)
