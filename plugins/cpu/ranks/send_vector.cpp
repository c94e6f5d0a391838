#include INGOT_LEVEL_HEADER
#include "ranks/send_kernel.h"

INGOT_KERNEL("send.f32." INGOT_LEVEL, SendArgs, ingot::send)
