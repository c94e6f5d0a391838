"""Qwen 3.5 and 3.6 with experts: a Qwen 3.5 whose MLPs are mixtures of experts, of which all tokens share one."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen2_moe, qwen3_5_text
from ingot.convert.hf_moe import expert_rows, read_experts, with_gated_shared_expert

_MOE = "moe_intermediate_size"


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen3_5MoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=32768, kv_heads=2, head_dim=256, partial_rotary=0.25, intermediate_key=_MOE, intermediate=512
    )
    moe = read_experts(
        section,
        experts=256,
        per_token=8,
        intermediate_size=model.intermediate_size,
        normalized=True,
        known=("shared_expert_intermediate_size",),
    )
    moe = with_gated_shared_expert(section, moe, 512)
    return dataclasses.replace(qwen3_5_text.read_hybrid(section, model), moe=moe)


EXPERTS = expert_rows("model.layers.{i}.mlp", gate="gate_proj", up="up_proj", down="down_proj") + qwen2_moe.SHARED

FAMILY = dataclasses.replace(
    qwen3_5_text.FAMILY,
    name="qwen3_5_moe_text",
    models="the text model of Qwen 3.5 and 3.6 with experts",
    read=read,
    rows=qwen3_5_text.FAMILY.rows + EXPERTS,
    tiny={
        **{key: value for key, value in qwen3_5_text.FAMILY.tiny.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text",
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
)
