"""ERNIE 4.5, dense: a Llama whose pairs of dimensions rotate side by side."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_rope import interleaved


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an Ernie4_5ForCausalLM; defaults are those of transformers."""
    default = None if section.is_null("head_dim") else 128
    model = llama.read_llama(
        section,
        positions=131072,
        kv_heads=2,
        head_dim=default,
        eps=1e-5,
        theta=5e5,
        tied=True,
        has_attention_bias=False,
    )
    bias = section.boolean("use_bias", False)
    return dataclasses.replace(
        model, rope=interleaved(model.rope), qkv_bias=bias, attention_out_bias=bias, mlp_bias=bias
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="ernie4_5",
    models="ERNIE 4.5 0.3B",
    read=read,
    tiny={**llama.FAMILY.tiny, "model_type": "ernie4_5", "tie_word_embeddings": True},
)
