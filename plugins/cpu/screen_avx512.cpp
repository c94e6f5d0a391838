#include "int8_avx512.h"
#include "screen_kernel.h"

INGOT_KERNEL("screen.w8.avx512", ScreenArgs, ingot::screen<ingot::Int8Avx512>, ingot::screen_scratch)
