"""FlexOlmo: an OLMo 2 whose MLPs are the experts of an OLMoE."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, olmo2, olmoe
from ingot.convert.hf_moe import expert_rows, read_experts


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a FlexOlmoForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=4096, theta=5e5)
    moe = read_experts(
        section,
        experts=7,
        per_token=5,
        intermediate_size=model.intermediate_size,
        normalized=section.boolean("norm_topk_prob", False),
    )
    return dataclasses.replace(model, qk_norm=QkNorm.WIDTH, pre_norms=False, post_norms=True, moe=moe)


FAMILY = dataclasses.replace(
    olmo2.FAMILY,
    name="flex_olmo",
    models="FlexOlmo 7x7B",
    read=read,
    rows=tuple(row for row in olmo2.FAMILY.rows if "/mlp/" not in row.name)
    + expert_rows("model.layers.{i}.mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    tiny={**olmoe.FAMILY.tiny, "model_type": "flex_olmo"},
)
