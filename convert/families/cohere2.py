"""Command A and R7B: a Cohere with windows in three of four layers, which alone rotate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import cohere
from ingot.convert.hf_config import read_window, windows_by_type


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Cohere2ForCausalLM; defaults are those of transformers."""
    model = cohere.read_cohere(section, theta=10000.0)
    every = section.integer("sliding_window_pattern", 4, minimum=1)
    usual = [(layer + 1) % every != 0 for layer in range(model.num_layers)]
    windows = windows_by_type(section, model.num_layers, read_window(section, 4096), usual)
    still = tuple(layer for layer in range(model.num_layers) if not (windows and windows[layer]))
    return dataclasses.replace(model, windows=windows, still_layers=still)


FAMILY = dataclasses.replace(
    cohere.FAMILY,
    name="cohere2",
    models="Command A, Command R7B",
    read=read,
    nullable=("num_key_value_heads", "layer_types"),
    tiny={
        **{key: value for key, value in cohere.FAMILY.tiny.items() if key != "use_qk_norm"},
        "model_type": "cohere2",
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
)
