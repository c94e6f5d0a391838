#include "int8_emulated.h"
#include "screen_kernel.h"

INGOT_KERNEL("screen.w8.avx512emu", ScreenArgs, ingot::screen<ingot::Int8Emulated>, ingot::screen_scratch)
