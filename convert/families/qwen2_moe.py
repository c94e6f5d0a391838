"""Qwen 1.5 and 2 with experts: a Qwen 2 whose tokens also share an expert behind a gate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3_moe
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import read_experts, shared_rows, with_gated_shared_expert


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen2MoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=16, has_attention_bias=False)
    dense_layers = qwen3_moe.read_dense_layers(section, model.num_layers)
    moe = read_experts(
        section,
        experts=60,
        per_token=4,
        intermediate_size=section.integer("moe_intermediate_size", 1408, minimum=1),
        normalized=section.boolean("norm_topk_prob", False),
        dense_layers=dense_layers,
        known=("shared_expert_intermediate_size",),
    )
    moe = with_gated_shared_expert(section, moe, 5632)
    return dataclasses.replace(
        model,
        qkv_bias=section.boolean("qkv_bias", True),
        windows=_windows(section, model.num_layers),
        moe=None if len(dense_layers) == model.num_layers else moe,
    )


def _windows(section: Section, layers: int) -> tuple[int, ...]:
    """Every other layer below max_window_layers has the window, unless layer_types says otherwise."""
    window = read_window(section, 4096) if section.boolean("use_sliding_window", False) else 0
    section.has("sliding_window")  # switched off, it has no effect
    end = section.integer("max_window_layers", 28)
    usual = [bool(window) and layer < end and layer % 2 == 0 for layer in range(layers)]
    return windows_by_type(section, layers, window, usual)


SHARED = shared_rows("model.layers.{i}.mlp.shared_expert", scale="model.layers.{i}.mlp.shared_expert_gate.weight")

FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    read=read,
    rows=qwen3_moe.FAMILY.rows + SHARED,
    nullable=("sliding_window", "layer_types", "mlp_only_layers"),
    tiny={
        **{key: value for key, value in qwen3_moe.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 28,
        "norm_topk_prob": False,
    },
)
