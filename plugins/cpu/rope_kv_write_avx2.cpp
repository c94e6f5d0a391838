#include "rope_kv_write_kernel.h"
#include "simd_avx2.h"

INGOT_KERNEL("rope_kv_write.f32.avx2", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx2, float>))
INGOT_KERNEL("rope_kv_write.bf16.avx2", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx2, uint16_t>))
INGOT_KERNEL("rope_kv_write.int8.avx2", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx2, int8_t>))
