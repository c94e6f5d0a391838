#include "int8_avx2.h"
#include "screen_kernel.h"

INGOT_KERNEL("screen.w8.avx2", ScreenArgs, ingot::screen<ingot::Int8Avx2>, ingot::screen_scratch)
