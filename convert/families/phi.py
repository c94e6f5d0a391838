"""Phi 1, 1.5 and 2: layer norms, both branches read one of them, biases everywhere, half of each head rotates."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.errors import UnsupportedModelError


def refuse_layer_norms(section: Section) -> None:
    """Raise UnsupportedModelError for queries and keys that layer norms norm."""
    if section.boolean("qk_layernorm", False):
        raise UnsupportedModelError(
            "qk_layernorm true is not supported: ingot has no layer norm of queries and keys",
            where=section.place("qk_layernorm"),
            expected="false",
            got="true",
        )


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a PhiForCausalLM; defaults are those of transformers."""
    refuse_layer_norms(section)
    model = llama.read_llama(
        section, activation="gelu_new", partial_rotary=0.5, eps_key="layer_norm_eps", eps=1e-5, has_attention_bias=False
    )
    return dataclasses.replace(
        model,
        norm=Norm.LAYER,
        gated_mlp=False,
        parallel_branches=True,
        shared_norm=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


_LAYER = "model.layers.{i}"

FAMILY = Family(
    name="phi",
    models="Phi-1, Phi-1.5, Phi-2",
    read=read,
    rows=takes(
        {
            "embed/weight": "model.embed_tokens.weight",
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.input_layernorm",
                    "layers.{i}/attn/q": f"{_LAYER}.self_attn.q_proj",
                    "layers.{i}/attn/k": f"{_LAYER}.self_attn.k_proj",
                    "layers.{i}/attn/v": f"{_LAYER}.self_attn.v_proj",
                    "layers.{i}/attn/out": f"{_LAYER}.self_attn.dense",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.fc1",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.fc2",
                    "norm": "model.final_layernorm",
                    "lm_head": "lm_head",
                }
            ),
        }
    ),
    nullable=("num_key_value_heads",),
    tiny={
        "model_type": "phi",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
