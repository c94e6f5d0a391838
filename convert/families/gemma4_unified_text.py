"""Gemma 4 12B, its text model: a Gemma 4 without embeddings of its layers and without experts."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma4_text


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma4UnifiedForCausalLM; defaults are those of transformers."""
    return gemma4_text.read_plain(section, positions=262144, window=1024)


_OF_OTHERS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")

FAMILY = dataclasses.replace(
    gemma4_text.FAMILY,
    name="gemma4_unified_text",
    models="the text model of Gemma 4 12B",
    read=read,
    tiny={
        **{key: value for key, value in gemma4_text.FAMILY.tiny.items() if key not in _OF_OTHERS},
        "model_type": "gemma4_unified_text",
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
)
