"""OLMo of 2024: a Llama whose norms are layer norms with neither weights nor biases."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import require_values


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an OlmoForCausalLM; defaults are those of transformers."""
    require_values(section, {"clip_qkv": None})
    model = llama.read_llama(section, eps_key=None, eps=1e-5)
    return dataclasses.replace(model, norm=Norm.LAYER, norm_weights=False, norm_bias=False)


ROWS = tuple(row for row in llama.FAMILY.rows if not row.name.endswith("norm/weight"))

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="olmo",
    models="OLMo 1B and 7B without `clip_qkv`",
    read=read,
    rows=ROWS,
    nullable=("num_key_value_heads", "clip_qkv"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "olmo",
        "eos_token_id": 2,
    },
)
