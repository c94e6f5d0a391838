"""EXAONE 4: a Qwen 3 with norms behind the branches, and windows in three of four layers, which alone rotate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, olmo2
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an Exaone4ForCausalLM; defaults as in transformers. Without windows every layer rotates."""
    model = llama.read_llama(section, kv_heads=32, eps=1e-5, has_attention_bias=False)
    window = read_window(section, 4096)
    if section.has("layer_types"):
        section.raw("sliding_window_pattern")  # layer_types has said it already
        usual: list[bool] = []
    elif not window:
        raise ConfigError(
            "layer_types is missing, and the model has no sliding window",
            where=section.place("layer_types"),
            expected="layer_types, or sliding_window",
            hint="compare config.json with the model's page, or download it again",
        )
    else:
        every = section.integer("sliding_window_pattern", 4, minimum=1)
        usual = [(layer + 1) % every != 0 for layer in range(model.num_layers)]
    windows = windows_by_type(section, model.num_layers, window, usual)
    still = tuple(layer for layer in range(model.num_layers) if window and not (windows and windows[layer]))
    return dataclasses.replace(
        model, qk_norm=QkNorm.HEAD, pre_norms=False, post_norms=True, windows=windows, still_layers=still
    )


FAMILY = dataclasses.replace(
    olmo2.FAMILY,
    name="exaone4",
    models="EXAONE 4.0 1.2B and 32B",
    read=read,
    nullable=("sliding_window", "layer_types"),
    tiny={**olmo2.FAMILY.tiny, "model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": 16}
    | {"sliding_window_pattern": 2, "bos_token_id": 1},
)
