#include INGOT_LEVEL_HEADER
#include "sampling/screen_kernel.h"

INGOT_KERNEL("screen.w8." INGOT_LEVEL, ScreenArgs, ingot::screen<ingot::Int8>, ingot::screen_scratch)
