"""Ministral 8B of 2024: a Mistral some of whose layers see all tokens."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama, mistral
from ingot.convert.hf_config import read_window, windows_by_type


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MinistralForCausalLM; defaults are those of transformers."""
    section.integer("head_dim", minimum=1)  # transformers has no default for it
    model = llama.read_llama(section, positions=131072, kv_heads=8, has_attention_bias=False)
    window = read_window(section, 4096)
    usual = [bool(window)] * model.num_layers
    return dataclasses.replace(model, windows=windows_by_type(section, model.num_layers, window, usual))


FAMILY = dataclasses.replace(
    mistral.FAMILY,
    name="ministral",
    models="Ministral 8B of 2024",
    read=read,
    nullable=("layer_types",),
    tiny={**mistral.FAMILY.tiny, "model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"]},
)
