"""Nemotron 3 (2024) and 4, Minitron: layer norms whose factor is 1 + w, half of each head rotates, a squared ReLU."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama, stablelm


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a NemotronForCausalLM; defaults are those of transformers."""
    section.integer("num_key_value_heads", minimum=1)  # transformers has no default that it can use
    model = llama.read_llama(
        section, positions=4096, eps_key="norm_eps", eps=1e-5, activation="relu2", partial_rotary=0.5
    )
    return dataclasses.replace(
        model, norm=Norm.LAYER, norm_offset=1.0, gated_mlp=False, mlp_bias=section.boolean("mlp_bias", False)
    )


FAMILY = dataclasses.replace(
    stablelm.FAMILY,
    name="nemotron",
    models="Nemotron 4, Minitron 4B and 8B",
    read=read,
    nullable=("head_dim",),
    tiny={**llama.FAMILY.tiny, "model_type": "nemotron", "bos_token_id": 1, "eos_token_id": 2},
)
