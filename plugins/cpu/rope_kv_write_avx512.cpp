#include "rope_kv_write_kernel.h"
#include "simd_avx512.h"

INGOT_KERNEL("rope_kv_write.f32.avx512", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx512, float>))
INGOT_KERNEL("rope_kv_write.bf16.avx512", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx512, uint16_t>))
INGOT_KERNEL("rope_kv_write.int8.avx512", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdAvx512, int8_t>))
