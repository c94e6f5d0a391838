#include INGOT_LEVEL_HEADER
#include "attention/latent_attention_kernel.h"

INGOT_KERNEL("latent_attention.f32." INGOT_LEVEL, LatentAttentionArgs, (ingot::latent_attention<ingot::Simd, float>),
             (ingot::latent_attention_scratch<ingot::Simd, float>))
INGOT_KERNEL("latent_attention.bf16." INGOT_LEVEL, LatentAttentionArgs,
             (ingot::latent_attention<ingot::Simd, uint16_t>), (ingot::latent_attention_scratch<ingot::Simd, uint16_t>))
