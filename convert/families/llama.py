"""Llama 2 and 3.x, and SmolLM: RMS norms, rotary positions, grouped keys, gated SiLU. Many families are its twins."""

import dataclasses
from collections.abc import Collection, Sequence

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes
from ingot.convert.hf_config import read_head_dim, read_kv_heads
from ingot.convert.hf_rope import KINDS, read_rope
from ingot.convert.weights import Drop


def read_llama(
    section: Section,
    *,
    layers: int | None = None,
    positions: int = 2048,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    eps_key: str | None = "rms_norm_eps",
    activation_key: str | None = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    has_attention_bias: bool = True,
    rope_kinds: Sequence[str] = KINDS,
    intermediate_key: str = "intermediate_size",
    intermediate: int | None = None,
    one_rope: bool = True,
) -> ModelConfig:
    """What a Llama and its twins share. The arguments are the family's defaults in transformers.

    layers None: config.json counts them; kv_heads None: one per query head; head_dim None: hidden_size /
    num_attention_heads; intermediate None: config.json has it; activation_key None: silu in every model;
    eps_key None: eps in every model.
    has_attention_bias: whether the family knows the key. rope_kinds: scalings of rotary positions that it has; one_rope
    False: the family reads its rotations itself.
    """
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    if head_dim is None and not section.has("head_dim"):
        head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    head_dim = section.integer("head_dim", head_dim, minimum=1)
    max_positions = section.integer("max_position_embeddings", positions, minimum=1)
    attention_bias = has_attention_bias and section.boolean("attention_bias", False)
    return ModelConfig(
        family=section.text("model_type"),
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer(intermediate_key, intermediate, minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1) if layers is None else layers,
        heads=heads,
        kv_heads=read_kv_heads(section, heads, kv_heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm=Norm.RMS,
        norm_eps=eps if eps_key is None else section.number(eps_key, eps, above=0),
        activation="silu" if activation_key is None else read_activation(section, activation_key, activation),
        gated_mlp=True,
        rope=read_rope(section, head_dim, max_positions, theta=theta, partial=partial_rotary, kinds=rope_kinds)
        if one_rope
        else None,
        attention_scale=head_dim**-0.5,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        tied_embeddings=section.boolean("tie_word_embeddings", tied),
    )


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a LlamaForCausalLM; defaults are those of transformers."""
    return dataclasses.replace(read_llama(section), mlp_bias=section.boolean("mlp_bias", False))


_LAYER = "model.layers.{i}"

FAMILY = Family(
    name="llama",
    models="Llama 2, 3, 3.1 and 3.2 (text), TinyLlama, SmolLM2",
    read=read,
    rows=takes(
        {
            "embed/weight": "model.embed_tokens.weight",
            "layers.{i}/attn_norm/weight": f"{_LAYER}.input_layernorm.weight",
            "layers.{i}/attn/q/weight": f"{_LAYER}.self_attn.q_proj.weight",
            "layers.{i}/attn/q/bias": f"{_LAYER}.self_attn.q_proj.bias",
            "layers.{i}/attn/k/weight": f"{_LAYER}.self_attn.k_proj.weight",
            "layers.{i}/attn/k/bias": f"{_LAYER}.self_attn.k_proj.bias",
            "layers.{i}/attn/v/weight": f"{_LAYER}.self_attn.v_proj.weight",
            "layers.{i}/attn/v/bias": f"{_LAYER}.self_attn.v_proj.bias",
            "layers.{i}/attn/out/weight": f"{_LAYER}.self_attn.o_proj.weight",
            "layers.{i}/attn/out/bias": f"{_LAYER}.self_attn.o_proj.bias",
            "layers.{i}/mlp_norm/weight": f"{_LAYER}.post_attention_layernorm.weight",
            "layers.{i}/mlp/gate/weight": f"{_LAYER}.mlp.gate_proj.weight",
            "layers.{i}/mlp/gate/bias": f"{_LAYER}.mlp.gate_proj.bias",
            "layers.{i}/mlp/up/weight": f"{_LAYER}.mlp.up_proj.weight",
            "layers.{i}/mlp/up/bias": f"{_LAYER}.mlp.up_proj.bias",
            "layers.{i}/mlp/down/weight": f"{_LAYER}.mlp.down_proj.weight",
            "layers.{i}/mlp/down/bias": f"{_LAYER}.mlp.down_proj.bias",
            "norm/weight": "model.norm.weight",
            "lm_head/weight": "lm_head.weight",
        }
    ),
    drops=(Drop(f"{_LAYER}.self_attn.rotary_emb.inv_freq"),),  # Llama 2 files; computed from the configuration
    nullable=("head_dim", "num_key_value_heads"),
    tiny={
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
)
