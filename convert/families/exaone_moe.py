"""K-EXAONE: windows in three of four layers, which alone rotate, and experts scored by sigmoids beside a shared one."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import exaone4, glm4_moe, qwen3
from ingot.convert.hf_moe import dense_layers, expert_rows, shared_rows

_EXPERTS = MoeConfig(experts=64, per_token=8, intermediate_size=1024, normalized=True, scale=2.5)
_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an ExaoneMoeForCausalLM; defaults are those of transformers."""
    model = exaone4.read(section, names)
    first = section.integer("first_k_dense_replace", 1)
    plain = dense_layers(section, model.num_layers, usual=first, agree=False)
    moe = glm4_moe.read_sigmoid_experts(section.called(_NAMES), model.num_layers, plain, usual=_EXPERTS)
    return dataclasses.replace(model, pre_norms=True, post_norms=False, moe=moe)


_BLOCK = "model.layers.{i}.mlp"

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="exaone_moe",
    models="K-EXAONE 236B-A23B",
    read=read,
    rows=qwen3.FAMILY.rows
    + expert_rows(
        _BLOCK,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        bias=("gate.e_score_correction_bias", "e_score_correction_bias"),
    )
    + shared_rows(f"{_BLOCK}.shared_experts"),
    drafts="mtp.",
    nullable=("layer_types", "mlp_layer_types"),
    tiny={
        **exaone4.FAMILY.tiny,
        "model_type": "exaone_moe",
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
    },
)
