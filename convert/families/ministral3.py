"""Ministral 3: a Mistral whose queries grow with their position, beyond the positions that it was first trained with.

They are multiplied by 1 + beta * log(1 + floor(position / original)).
"""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, YarnScaling
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window
from ingot.convert.hf_rope import rope_section
from ingot.errors import ConfigError

_YARN = YarnScaling(factor=16.0, original_positions=16384)  # where the configuration has no rotation


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Ministral3ForCausalLM; defaults are those of transformers."""
    default = None if section.is_null("head_dim") else 128
    model = llama.read_llama(
        section, positions=262144, kv_heads=8, head_dim=default, eps=1e-5, theta=1e6, has_attention_bias=False
    )
    assert model.rope is not None, "read_llama reads a rotation"
    rotary, (growth, every) = model.rope, (0.1, _YARN.original_positions)
    if section.has("rope_parameters") or section.has("rope_scaling"):
        growth, every = read_growth(rope_section(section))
    else:  # whatever rope_theta says
        positions = max(model.max_positions, int(_YARN.factor * _YARN.original_positions))
        rotary = dataclasses.replace(model.rope, theta=1e6, yarn=_YARN, positions=positions)
    window = read_window(section)
    return dataclasses.replace(
        model,
        rope=rotary,
        windows=(window,) * model.num_layers if window else (),
        query_growth=growth,
        growth_positions=every if growth else 0,
    )


def read_growth(rope: Section) -> tuple[float, int]:
    """(beta, positions before queries grow), as the object of the rotation says."""
    original = rope.integer("original_max_position_embeddings", minimum=1)
    if (growth := rope.number("llama_4_scaling_beta")) < 0:
        raise ConfigError(
            "llama_4_scaling_beta is negative",
            where=rope.place("llama_4_scaling_beta"),
            expected="0 or more",
            got=f"{growth:g}",
        )
    return growth, original


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="ministral3",
    models="Ministral 3 3B, 8B and 14B",
    read=read,
    nullable=("sliding_window",),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "ministral3",
        "sliding_window": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
)
