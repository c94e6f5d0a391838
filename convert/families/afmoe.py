"""Trinity of Arcee: windows in three of four layers, which alone rotate, a gate behind attention, norms around both
branches, and experts scored by sigmoids beside shared ones."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window, require_values, windows_by_type
from ingot.convert.hf_moe import expert_rows, read_experts, shared_rows

# What files say and transformers takes for granted.
_OF_ALL = {"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1, "num_limited_groups": 1}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an AfmoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=16384, head_dim=128, eps=1e-5)
    layers = model.num_layers
    require_values(section, _OF_ALL)
    for key in ("load_balance_coeff", "use_grouped_mm"):
        section.has(key)  # of the training
    every = section.integer("global_attn_every_n_layers", 4, minimum=1)
    usual = [(layer + 1) % every != 0 for layer in range(layers)]
    windows = windows_by_type(section, layers, read_window(section, 1024), usual)
    inner = section.integer("moe_intermediate_size", 1408, minimum=1)
    dense = min(section.integer("num_dense_layers", 1), layers)
    moe = read_experts(
        section,
        experts=64,
        per_token=6,
        intermediate_size=inner,
        normalized=True,
        dense_layers=tuple(range(dense)),
        known=("num_shared_experts",),
    )
    moe = dataclasses.replace(
        moe,
        score=RouterScore.SIGMOID,
        select_bias=True,
        sum_offset=1e-20,
        scale=section.number("route_scale", 1.0, above=0),
        shared_size=inner * section.integer("num_shared_experts", 2, minimum=1),
    )
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        post_norms=True,
        output_gate=True,
        gate_without_bias=True,
        embedding_scale=model.hidden_size**0.5 if section.boolean("mup_enabled", False) else 1.0,
        windows=windows,
        still_layers=tuple(layer for layer in range(layers) if not (windows and windows[layer])),
        moe=None if dense == layers else moe,
    )


_LAYER = "model.layers.{i}"
_OWN = {
    "layers.{i}/attn/gate/weight": f"{_LAYER}.self_attn.gate_proj.weight",
    "layers.{i}/attn_post_norm/weight": f"{_LAYER}.post_attention_layernorm.weight",
    "layers.{i}/mlp_norm/weight": f"{_LAYER}.pre_mlp_layernorm.weight",
    "layers.{i}/mlp_post_norm/weight": f"{_LAYER}.post_mlp_layernorm.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="afmoe",
    models="Trinity Nano, Mini and Large",
    read=read,
    rows=tuple(row for row in llama.FAMILY.rows if row.name not in _OWN)
    + QK_NORMS
    + takes(_OWN)
    + expert_rows(
        f"{_LAYER}.mlp",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
        router=("router.gate.weight",),
        bias=("expert_bias",),
    )
    + shared_rows(f"{_LAYER}.mlp.shared_experts"),
    nullable=("num_key_value_heads", "layer_types"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "afmoe",
        "num_hidden_layers": 3,
        "global_attn_every_n_layers": 2,
        "sliding_window": 16,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 20,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
)
