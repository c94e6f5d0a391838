"""Qwen 2 and 2.5: a Llama with biases on q, k and v; some of its layers may have a window."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window, windows_by_type


def read_windows(section: Section, layers: int) -> tuple[int, ...]:
    """Layers from max_window_layers on have the window, unless layer_types says otherwise."""
    window = read_window(section, 4096) if section.boolean("use_sliding_window", False) else 0
    section.has("sliding_window")  # switched off, it has no effect
    first = section.integer("max_window_layers", 28)
    return windows_by_type(section, layers, window, [bool(window) and layer >= first for layer in range(layers)])


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen2ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=32, has_attention_bias=False)
    windows = read_windows(section, model.num_layers)
    return dataclasses.replace(model, qkv_bias=True, windows=windows)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen2",
    models="Qwen2, Qwen2.5, QwQ",
    read=read,
    nullable=("num_key_value_heads", "sliding_window", "layer_types"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
)
