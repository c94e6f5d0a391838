"""SmolLM3: a Llama some of whose layers do not rotate queries and keys; these may have a window."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a SmolLM3ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=4, theta=2e6, tied=True)
    still = _still_layers(section, model.num_layers)
    window = read_window(section) if section.boolean("use_sliding_window", False) else 0
    section.has("sliding_window")  # switched off, it has no effect
    usual = [bool(window) and layer in still for layer in range(model.num_layers)]
    return dataclasses.replace(
        model,
        mlp_bias=section.boolean("mlp_bias", False),
        still_layers=still,
        windows=windows_by_type(section, model.num_layers, window, usual),
    )


def _still_layers(section: Section, layers: int) -> tuple[int, ...]:
    """Those that no_rope_layers, whose 1 is a rotation, says 0 of; where it is absent, each so many-th."""
    every = section.integer("no_rope_layer_interval", 4, minimum=1)
    if not section.has("no_rope_layers"):
        section.numbers("no_rope_layers")
        return tuple(layer for layer in range(layers) if (layer + 1) % every == 0)
    rotates = section.numbers("no_rope_layers")
    if len(rotates) != layers or any(each not in (0, 1) for each in rotates):
        raise ConfigError(
            "no_rope_layers has a wrong value",
            where=section.place("no_rope_layers"),
            expected=f"0 or 1 for each of {layers} layers",
            got=repr(list(rotates))[:200],
        )
    return tuple(layer for layer, each in enumerate(rotates) if each == 0)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="smollm3",
    models="SmolLM3 3B",
    read=read,
    nullable=("num_key_value_heads", "sliding_window", "layer_types", "no_rope_layers"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
