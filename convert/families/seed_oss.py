"""Seed-OSS: a Llama with biases on q, k and v."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a SeedOssForCausalLM; defaults are those of transformers."""
    default = None if section.is_null("head_dim") else 128
    model = llama.read_llama(section, positions=524288, kv_heads=8, head_dim=default, has_attention_bias=False)
    return dataclasses.replace(
        model,
        qkv_bias=section.boolean("attention_bias", True),
        attention_out_bias=section.boolean("attention_out_bias", False),
        mlp_bias=section.boolean("mlp_bias", False),
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="seed_oss",
    models="Seed-OSS 36B",
    read=read,
    tiny={**llama.FAMILY.tiny, "model_type": "seed_oss", "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
)
