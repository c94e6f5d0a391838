"""Granite 3 with experts: a Granite whose MLPs are mixtures of experts, stored stacked."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import granite, llama
from ingot.convert.family import takes
from ingot.convert.hf_moe import read_experts


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GraniteMoeForCausalLM; defaults are those of transformers. Its MLPs have no biases."""
    model = granite.read_granite(section)
    moe = read_experts(section, experts=8, per_token=2, intermediate_size=model.intermediate_size, normalized=True)
    return dataclasses.replace(model, moe=moe)


_BLOCK = "model.layers.{i}.block_sparse_moe"
_EXPERTS = {
    "layers.{i}/moe/router/weight": f"{_BLOCK}.router.layer.weight",
    "layers.{i}/moe/gate_up/weight": f"{_BLOCK}.input_linear.weight",
    "layers.{i}/moe/down/weight": f"{_BLOCK}.output_linear.weight",
}

FAMILY = dataclasses.replace(
    granite.FAMILY,
    name="granitemoe",
    models="Granite 3 1B-A400M and 3B-A800M",
    read=read,
    rows=llama.FAMILY.rows + takes(_EXPERTS),
    tiny={
        **granite.FAMILY.tiny,
        "model_type": "granitemoe",
        "intermediate_size": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
)
