"""GPT-J: layer norms, both branches read one of them, pairs of dimensions side by side rotate, biases in the MLP."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, RopeConfig
from ingot.configs.read import Section
from ingot.convert.families import gpt2
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.weights import Drop
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GPTJForCausalLM; defaults are those of transformers, which always rotates and scales."""
    model = gpt2.read(section, None)
    section.boolean("rotary", True)
    rotary_dim = section.integer("rotary_dim", 64, minimum=2)
    if rotary_dim % 2 or rotary_dim > model.head_dim:
        raise ConfigError(
            "rotary_dim is not an even number of dimensions of a head",
            where=section.place("rotary_dim"),
            expected=f"an even number up to {model.head_dim}",
            got=str(rotary_dim),
        )
    return dataclasses.replace(
        model,
        family=section.text("model_type"),
        max_positions=section.integer("n_positions", 2048, minimum=1),
        rope=RopeConfig(theta=10000.0, rotary_dim=rotary_dim, interleaved=True),
        attention_scale=model.head_dim**-0.5,
        scale_by_inverse_layer=False,
        parallel_branches=True,
        shared_norm=True,
        fused_qkv=False,
        qkv_bias=False,
        attention_out_bias=False,
        linear_in_out=False,
        head_bias=True,
        tied_embeddings=section.boolean("tie_word_embeddings", False),
    )


_LAYER = "transformer.h.{i}"

FAMILY = Family(
    name="gptj",
    models="GPT-J 6B",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.wte.weight",
            **{f"layers.{{i}}/attn/{x}/weight": f"{_LAYER}.attn.{x}_proj.weight" for x in ("q", "k", "v", "out")},
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.ln_1",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.fc_in",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.fc_out",
                    "norm": "transformer.ln_f",
                    "lm_head": "lm_head",
                }
            ),
        }
    ),
    drops=(Drop(f"{_LAYER}.attn.bias"), Drop(f"{_LAYER}.attn.masked_bias")),  # old files keep their causal masks
    nullable=("n_inner",),
    aliases=gpt2.FAMILY.aliases,
    tiny={**gpt2.FAMILY.tiny, "model_type": "gptj", "rotary_dim": 8, "tie_word_embeddings": False},
)
