"""Helium: a Llama whose pairs of dimensions rotate side by side."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_rope import interleaved
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a HeliumForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=4096, kv_heads=20, head_dim=128, eps=1e-8, theta=1e5, has_attention_bias=False
    )
    if model.heads * model.head_dim != model.hidden_size:
        raise ConfigError(
            "head_dim times the number of heads is not the hidden size",
            where=section.place("head_dim"),
            expected=f"hidden_size / num_attention_heads: {model.hidden_size} / {model.heads}",
            got=str(model.head_dim),
        )
    return dataclasses.replace(
        model,
        rope=interleaved(model.rope),
        qkv_bias=section.boolean("attention_bias", False),
        mlp_bias=section.boolean("mlp_bias", False),
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="helium",
    models="Helium 1 2B",
    read=read,
    nullable=(),
    tiny={**llama.FAMILY.tiny, "model_type": "helium", "head_dim": 12, "bos_token_id": 1, "eos_token_id": 2},
)
