#include INGOT_LEVEL_HEADER
#include "attention/latent_kv_write_kernel.h"

INGOT_KERNEL("latent_kv_write.f32." INGOT_LEVEL, LatentKvWriteArgs, (ingot::latent_kv_write<ingot::Simd, float>))
INGOT_KERNEL("latent_kv_write.bf16." INGOT_LEVEL, LatentKvWriteArgs, (ingot::latent_kv_write<ingot::Simd, uint16_t>))
