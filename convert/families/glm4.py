"""GLM-4 0414: a Llama with norms around both branches; half of each head rotates, in pairs side by side."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes
from ingot.convert.hf_rope import interleaved


def read_glm(section: Section) -> ModelConfig:
    """What GLM-4 and its 0414 releases share; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=131072, kv_heads=2, head_dim=128, eps=1.5625e-7, partial_rotary=0.5, has_attention_bias=False
    )
    bias = section.boolean("attention_bias", True)
    return dataclasses.replace(model, rope=interleaved(model.rope), qkv_bias=bias, fused_gate_up=True)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Glm4ForCausalLM."""
    return dataclasses.replace(read_glm(section), post_norms=True)


_MORE = {
    "layers.{i}/mlp/gate_up/weight": "model.layers.{i}.mlp.gate_up_proj.weight",
    "layers.{i}/attn_post_norm/weight": "model.layers.{i}.post_self_attn_layernorm.weight",
    "layers.{i}/mlp_post_norm/weight": "model.layers.{i}.post_mlp_layernorm.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="glm4",
    models="GLM-4 0414 9B and 32B, GLM-Z1",
    read=read,
    rows=llama.FAMILY.rows + takes(_MORE),
    nullable=(),
    tiny={**llama.FAMILY.tiny, "model_type": "glm4", "eos_token_id": 2, "pad_token_id": 0},
)
