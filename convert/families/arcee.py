"""AFM of Arcee: a Llama whose MLPs have no gate and square what a ReLU leaves."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an ArceeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=4096, eps=1e-5, activation="relu2")
    return dataclasses.replace(model, gated_mlp=False, mlp_bias=section.boolean("mlp_bias", False))


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="arcee",
    models="Arcee AFM 4.5B",
    read=read,
    tiny={**llama.FAMILY.tiny, "model_type": "arcee", "bos_token_id": 1, "eos_token_id": 2},
)
