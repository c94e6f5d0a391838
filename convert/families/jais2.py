"""Jais 2: a Llama with layer norms and biases, whose MLPs have no gate and square what a ReLU leaves."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama, stablelm


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Jais2ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=8192, eps_key="layer_norm_eps", eps=1e-5, activation="relu2", has_attention_bias=False
    )
    bias = section.boolean("attention_bias", True)
    return dataclasses.replace(
        model,
        norm=Norm.LAYER,
        gated_mlp=False,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=section.boolean("mlp_bias", True),
    )


FAMILY = dataclasses.replace(
    stablelm.FAMILY,
    name="jais2",
    models="Jais 2 8B and 70B",
    read=read,
    nullable=("head_dim", "num_key_value_heads"),
    tiny={**llama.FAMILY.tiny, "model_type": "jais2", "bos_token_id": 1, "eos_token_id": 2},
)
