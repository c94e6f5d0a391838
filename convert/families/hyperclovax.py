"""HyperCLOVA X SEED Think: a Granite with norms behind its branches, whose logits are multiplied by a factor."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a HyperCLOVAXForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section)
    scale = model.attention_scale
    if section.has("attention_multiplier"):
        scale = section.number("attention_multiplier", above=0)
    return dataclasses.replace(
        model,
        embedding_scale=section.number("embedding_multiplier", 1.0, above=0),
        attention_scale=scale,
        residual_scale=section.number("residual_multiplier", 1.0, above=0),
        logit_scale=section.number("logits_scaling", 1.0, above=0),
        mlp_bias=section.boolean("mlp_bias", False),
        post_norms=section.boolean("use_post_norm", True),
    )


_NORMS = {
    "layers.{i}/attn_post_norm/weight": "model.layers.{i}.post_norm1.weight",
    "layers.{i}/mlp_post_norm/weight": "model.layers.{i}.post_norm2.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="hyperclovax",
    models="HyperCLOVA X SEED Think 14B and 32B",
    read=read,
    rows=llama.FAMILY.rows + takes(_NORMS),
    nullable=("head_dim", "num_key_value_heads", "attention_multiplier"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "hyperclovax",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
