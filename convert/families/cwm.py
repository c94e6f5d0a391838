"""Code World Model: a Llama with windows in three of four layers."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import Llama3Scaling, ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_rope import rope_section

_EVERY = 4  # each so many-th layer, the first too, sees all tokens
_USUAL = Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a CwmForCausalLM; defaults are those of transformers, whose rotation is stretched."""
    model = llama.read_llama(
        section, positions=131072, kv_heads=8, head_dim=128, eps=1e-5, theta=1e6, has_attention_bias=False
    )
    usual = [layer % _EVERY != 0 for layer in range(model.num_layers)]
    rope = model.rope
    if rope is not None and not rope_section(section).values():
        rope = dataclasses.replace(rope, llama3=_USUAL)
    return dataclasses.replace(
        model,
        rope=rope,
        mlp_bias=section.boolean("mlp_bias", False),
        windows=windows_by_type(section, model.num_layers, read_window(section, 8192), usual),
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="cwm",
    models="Code World Model 32B",
    read=read,
    nullable=("layer_types",),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "cwm",
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
