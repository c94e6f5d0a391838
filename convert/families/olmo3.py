"""OLMo 3: an OLMo 2 with windows in three of four layers; full layers may have a rotation of their own."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, olmo2
from ingot.convert.families.gemma3_text import read_ropes
from ingot.convert.hf_config import read_window, windows_by_type


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an Olmo3ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, eps=1e-5)
    usual = [(layer + 1) % 4 != 0 for layer in range(model.num_layers)]
    windows = windows_by_type(section, model.num_layers, read_window(section, 4096), usual)
    rope, local_rope = read_ropes(section, model, theta=5e5, local_theta=5e5, local_key=None)
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.WIDTH,
        pre_norms=False,
        post_norms=True,
        windows=windows,
        rope=rope,
        local_rope=local_rope if any(windows) else None,
    )


FAMILY = dataclasses.replace(
    olmo2.FAMILY,
    name="olmo3",
    models="OLMo 3",
    read=read,
    layer_ropes=True,
    nullable=("num_key_value_heads", "layer_types"),
    tiny={
        **{key: value for key, value in olmo2.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 16,
    },
)
