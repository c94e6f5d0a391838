"""Mistral: a Llama whose layers see a window of the last tokens."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MistralForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=131072, kv_heads=8, has_attention_bias=False)
    window = read_window(section, 4096)
    return dataclasses.replace(model, windows=(window,) * model.num_layers if window else ())


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mistral",
    models="Mistral 7B, Mistral Nemo, Mistral Small 3",
    read=read,
    nullable=("head_dim", "sliding_window"),
    tiny={**llama.FAMILY.tiny, "model_type": "mistral", "sliding_window": 16},
)
