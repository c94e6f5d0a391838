"""Gemma 2: norms around both branches whose factor is 1 + w, windows in every other layer, caps, scaled embeddings."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window, windows_by_type


def read_gemma(section: Section, *, every: int, positions: int) -> ModelConfig:
    """What Gemma 2 and 3 share. every: each so many-th layer sees all tokens; positions: default."""
    model = llama.read_llama(
        section,
        positions=positions,
        kv_heads=4,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
    )
    usual = [(layer + 1) % every != 0 for layer in range(model.num_layers)]
    return dataclasses.replace(
        model,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=model.hidden_size**0.5,
        attention_scale=section.number("query_pre_attn_scalar", 256.0, above=0) ** -0.5,
        windows=windows_by_type(section, model.num_layers, read_window(section, 4096), usual),
    )


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma2ForCausalLM; defaults are those of transformers."""
    return dataclasses.replace(
        read_gemma(section, every=2, positions=8192),
        score_cap=read_cap(section, "attn_logit_softcapping", 50.0),
        logit_cap=read_cap(section, "final_logit_softcapping", 30.0),
    )


def read_cap(section: Section, key: str, default: float) -> float:
    """A cap; 0 where it is null, or absent without a default."""
    if section.has(key):
        return section.number(key, above=0)
    return section.number(key, 0.0 if section.is_null(key) else default)


_NORMS = {
    "layers.{i}/attn_norm/weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}/attn_post_norm/weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}/mlp_norm/weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}/mlp_post_norm/weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_OTHERS = tuple(row for row in llama.FAMILY.rows if "norm" not in row.name.split("/")[1] or row.name == "norm/weight")

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="gemma2",
    models="Gemma 2 2B, 9B and 27B",
    read=read,
    rows=_OTHERS + takes(_NORMS),
    nullable=("layer_types", "attn_logit_softcapping", "final_logit_softcapping"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "gemma2",
        "head_dim": 20,
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
