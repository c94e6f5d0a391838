"""Granite 3 and 4, dense: a Llama with factors on embeddings, scores, branches and logits."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama


def read_granite(section: Section, intermediate: int | None = None) -> ModelConfig:
    """What Granite shares with its mixtures of experts; defaults are those of transformers."""
    return dataclasses.replace(
        llama.read_llama(section, intermediate=intermediate),
        embedding_scale=section.number("embedding_multiplier", 1.0, above=0),
        attention_scale=section.number("attention_multiplier", 1.0, above=0),
        residual_scale=section.number("residual_multiplier", 1.0, above=0),
        logit_scale=1 / section.number("logits_scaling", 1.0, above=0),
    )


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GraniteForCausalLM."""
    return dataclasses.replace(read_granite(section), mlp_bias=section.boolean("mlp_bias", False))


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="granite",
    models="Granite 3 and 4, dense",
    read=read,
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
)
