#include "rope_kv_write_kernel.h"
#include "simd_emulated.h"

INGOT_KERNEL("rope_kv_write.f32.avx512emu", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdEmulated, float>))
INGOT_KERNEL("rope_kv_write.bf16.avx512emu", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdEmulated, uint16_t>))
INGOT_KERNEL("rope_kv_write.int8.avx512emu", RopeKvWriteArgs, (ingot::rope_kv_write<ingot::SimdEmulated, int8_t>))
