"""Gemma: a Llama with scaled embeddings, norms whose factor is 1 + w, and a gate with GELU."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GemmaForCausalLM; defaults are those of transformers, which takes the first files' "gelu" for
    the tanh approximation, and does not look at hidden_activation."""
    section.has("hidden_activation")
    model = llama.read_llama(
        section, positions=8192, kv_heads=16, head_dim=256, activation="gelu_pytorch_tanh", tied=True
    )
    activation = "gelu_tanh" if section.raw("hidden_act") == "gelu" else model.activation
    return dataclasses.replace(model, activation=activation, norm_offset=1.0, embedding_scale=model.hidden_size**0.5)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="gemma",
    models="Gemma 2B and 7B",
    read=read,
    nullable=(),
    tiny={**llama.FAMILY.tiny, "model_type": "gemma", "head_dim": 20, "tie_word_embeddings": True},
)
