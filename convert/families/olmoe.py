"""OLMoE: a Llama with experts, whose queries and keys are normed over their whole width."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3_moe
from ingot.convert.hf_moe import read_experts
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an OlmoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=4096, eps=1e-5)
    if section.has("clip_qkv"):
        raise UnsupportedModelError(
            "clip_qkv is not supported",
            where=section.place("clip_qkv"),
            expected="null",
            got=repr(section.raw("clip_qkv")),
        )
    moe = read_experts(
        section,
        experts=64,
        per_token=8,
        intermediate_size=model.intermediate_size,
        normalized=section.boolean("norm_topk_prob", False),
    )
    return dataclasses.replace(model, qk_norm=QkNorm.WIDTH, moe=moe)


FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    name="olmoe",
    models="OLMoE 1B-7B",
    read=read,
    nullable=("num_key_value_heads", "clip_qkv"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "olmoe",
        "intermediate_size": 20,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
