"""Orion 14B: a Llama with layer norms."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama, stablelm


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an OrionForCausalLM; defaults are those of the files' own code."""
    section.has("max_sequence_length")  # as max_position_embeddings
    model = llama.read_llama(section, positions=4096, eps=1e-5, has_attention_bias=False)
    return dataclasses.replace(model, norm=Norm.LAYER)


FAMILY = dataclasses.replace(
    stablelm.FAMILY,
    name="orion",
    models="Orion 14B",
    read=read,
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "orion",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
