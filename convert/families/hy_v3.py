"""Hunyuan 3: a Qwen 3 with experts scored by sigmoids, and an expert that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3
from ingot.convert.hf_moe import dense_layers, expert_rows, read_experts, shared_rows


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a HYV3ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=131072, kv_heads=8, head_dim=128, eps=1e-5, theta=11158840.0)
    inner = section.integer("moe_intermediate_size", 1536, minimum=1)
    plain = dense_layers(section, model.num_layers, usual=1, agree=False)
    section.boolean("enable_moe_fp32_combine", True)  # ingot adds in float32
    moe = read_experts(
        section,
        experts=192,
        per_token=8,
        intermediate_size=inner,
        normalized=True,
        dense_layers=plain,
        known=("num_shared_experts",),
    )
    moe = dataclasses.replace(
        moe,
        score=RouterScore.SIGMOID,
        select_bias=True,
        sum_offset=1e-20,
        scale=section.number("router_scaling_factor", 2.826, above=0),
        shared_size=inner * section.integer("num_shared_experts", 1, minimum=1),
    )
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        mlp_bias=section.boolean("mlp_bias", False),
        moe=None if len(plain) == model.num_layers else moe,
    )


_BLOCK = "model.layers.{i}.mlp"
_EXPERTS = expert_rows(
    _BLOCK,
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    router=("router.gate.weight", "gate.weight"),  # as trained; as transformers calls it
    bias=("expert_bias", "e_score_correction_bias"),
)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="hy_v3",
    models="Hunyuan 3",
    read=read,
    rows=qwen3.FAMILY.rows + _EXPERTS + shared_rows(f"{_BLOCK}.shared_mlp", f"{_BLOCK}.shared_experts"),
    drafts="model.layers.{n}.",
    nullable=("mlp_layer_types",),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "hy_v3",
        "num_hidden_layers": 3,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "num_shared_experts": 2,
    },
)
