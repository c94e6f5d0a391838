"""MiniCPM 1, 2 and 4: a Llama with factors on embeddings, branches and logits."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama, minicpm3
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MiniCPMForCausalLM; defaults are those of the files' own code."""
    for key, what in (("num_experts", "experts of MiniCPM-MoE"), ("sparse_config", "sparse attention of MiniCPM 4.1")):
        if section.has(key) and section.raw(key):
            raise UnsupportedModelError(
                f"{key} is not supported: ingot does not have the {what}",
                where=section.place(key),
                expected="no such key",
            )
    model = llama.read_llama(section, tied=True)
    return minicpm3.scaled(section, model, embeddings=1.0, depth=1.0, base=1)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="minicpm",
    models="MiniCPM 1B and 2B, MiniCPM4 0.5B and 8B",
    read=read,
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "minicpm",
        "scale_emb": 3,
        "scale_depth": 0.7,
        "dim_model_base": 24,
        "tie_word_embeddings": True,
    },
)
