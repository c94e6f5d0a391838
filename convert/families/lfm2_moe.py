"""LFM2 with experts: an LFM2 whose later layers have a mixture of experts, scored by sigmoids, instead of the MLP."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import lfm2
from ingot.convert.hf_moe import expert_rows, read_experts


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Lfm2MoeForCausalLM; defaults are those of transformers. It says which layers have attention."""
    model = lfm2.read_lfm2(section, intermediate=7168, attention=())
    return dataclasses.replace(model, moe=_read_experts(section, model.num_layers))


def _read_experts(section: Section, layers: int) -> MoeConfig | None:
    """None where every layer has a plain MLP."""
    dense = min(section.integer("num_dense_layers", 2), layers)
    moe = read_experts(
        section,
        experts=32,
        per_token=4,
        intermediate_size=section.integer("moe_intermediate_size", 1792, minimum=1),
        normalized=section.boolean("norm_topk_prob", True),
        dense_layers=tuple(range(dense)),
        known=("routed_scaling_factor",),
    )
    moe = dataclasses.replace(
        moe,
        score=RouterScore.SIGMOID,
        select_bias=section.boolean("use_expert_bias", True),
        sum_offset=1e-6,
        scale=section.number("routed_scaling_factor", 1.0, above=0),
    )
    return None if dense == layers else moe


_EXPERTS = expert_rows("model.layers.{i}.feed_forward", gate="w1", up="w3", down="w2", bias=("expert_bias",))

FAMILY = dataclasses.replace(
    lfm2.FAMILY,
    name="lfm2_moe",
    models="LFM2 8B-A1B",
    read=read,
    rows=lfm2.FAMILY.rows + _EXPERTS,
    tiny={
        **{key: value for key, value in lfm2.FAMILY.tiny.items() if not key.startswith("block_")},
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
    },
)
