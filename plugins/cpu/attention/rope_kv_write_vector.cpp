#include INGOT_LEVEL_HEADER
#include "attention/rope_kv_write_kernel.h"

INGOT_KERNEL("rope_kv_write.f32." INGOT_LEVEL, RopeKvWriteArgs, (ingot::rope_kv_write<ingot::Simd, float>))
INGOT_KERNEL("rope_kv_write.bf16." INGOT_LEVEL, RopeKvWriteArgs, (ingot::rope_kv_write<ingot::Simd, uint16_t>))
INGOT_KERNEL("rope_kv_write.int8." INGOT_LEVEL, RopeKvWriteArgs, (ingot::rope_kv_write<ingot::Simd, int8_t>))
INGOT_KERNEL("rope_kv_write.f8." INGOT_LEVEL, RopeKvWriteArgs, (ingot::rope_kv_write<ingot::Simd, uint8_t>))
