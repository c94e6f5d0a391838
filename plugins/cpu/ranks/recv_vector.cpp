#include INGOT_LEVEL_HEADER
#include "ranks/recv_kernel.h"

INGOT_KERNEL("recv.f32." INGOT_LEVEL, RecvArgs, ingot::recv)
