"""Solar Open: a GLM 4.5 whose heads rotate as a whole, with experts in every layer."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import glm4_moe, llama

_EXPERTS = MoeConfig(experts=128, per_token=8, intermediate_size=1280, normalized=True)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a SolarOpenForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section,
        positions=131072,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        theta=1e6,
        has_attention_bias=False,
        intermediate_key="moe_intermediate_size",
        intermediate=_EXPERTS.intermediate_size,
    )
    section.has("intermediate_size")  # of layers without experts, of which there are none
    return dataclasses.replace(
        model,
        qkv_bias=section.boolean("attention_bias", False),
        moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, (), usual=_EXPERTS),
    )


FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    name="solar_open",
    models="Solar Open 100B",
    read=read,
    drafts="",
    tiny={
        key: value
        for key, value in {**glm4_moe.FAMILY.tiny, "model_type": "solar_open"}.items()
        if key not in ("use_qk_norm", "intermediate_size")
    },
)
