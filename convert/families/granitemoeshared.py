"""Granite 4 Tiny Preview's kin: a Granite with experts beside one that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import granitemoe, granitemoehybrid


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GraniteMoeSharedForCausalLM; defaults are those of transformers."""
    model = granitemoe.read(section, names)
    assert model.moe is not None, "every layer has experts"
    shared = section.integer("shared_intermediate_size", 0)
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, shared_size=shared))


FAMILY = dataclasses.replace(
    granitemoe.FAMILY,
    name="granitemoeshared",
    models="MoE models of Granite with shared experts",
    read=read,
    rows=granitemoe.FAMILY.rows + tuple(row for row in granitemoehybrid.FAMILY.rows if "/moe/shared/" in row.name),
    tiny={**granitemoe.FAMILY.tiny, "model_type": "granitemoeshared", "shared_intermediate_size": 44},
)
