"""Mistral Small 4: latent attention whose queries grow with their position, and experts by softmax beside a shared one.

As in Ministral 3 queries are multiplied by 1 + beta * log(1 + floor(position / original)).
"""

import dataclasses
import math
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig, RouterScore, YarnScaling
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v2, deepseek_v3, glm4_moe, ministral3
from ingot.convert.hf_latent import read_latent
from ingot.convert.hf_rope import rope_section

_USUAL = LatentConfig(q_rank=1024, kv_rank=256, key_dim=64, rope_dim=64, value_dim=128)
_EXPERTS = MoeConfig(experts=128, per_token=4, intermediate_size=2048, normalized=True)
_YARN = YarnScaling(factor=128.0, original_positions=8192)  # where the configuration has no rotation


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Mistral4ForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=1048576, eps=1e-6, kv_heads=32, partial=True)
    assert model.rope is not None, "read_latent reads a rotation"
    rotary, scale, growth = model.rope, model.attention_scale, 0.1
    original = _YARN.original_positions
    if section.has("rope_parameters") or section.has("rope_scaling"):
        rope = rope_section(section)
        rope.has("max_position_embeddings")  # as outside of it
        growth, original = ministral3.read_growth(rope)
    else:
        positions = max(model.max_positions, int(_YARN.factor * _YARN.original_positions))
        rotary = dataclasses.replace(model.rope, yarn=_YARN, positions=positions)
        scale = model.attention_scale * (0.1 * math.log(_YARN.factor) + 1) ** 2
    moe = glm4_moe.read_sigmoid_experts(section, model.num_layers, usual=_EXPERTS)
    moe = None if moe is None else dataclasses.replace(moe, score=RouterScore.SOFTMAX, select_bias=False)
    return dataclasses.replace(
        model,
        rope=rotary,
        attention_scale=scale,
        moe=moe,
        query_growth=growth,
        growth_positions=original if growth else 0,
    )


FAMILY = dataclasses.replace(
    deepseek_v2.FAMILY,
    name="mistral4",
    models="Mistral Small 4",
    read=read,
    nullable=("q_lora_rank", "num_key_value_heads"),
    tiny={
        **deepseek_v3.FAMILY.tiny,
        "model_type": "mistral4",
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
)
