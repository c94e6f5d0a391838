"""Flint: a Qwen 3 with experts scored by sigmoids beside a shared one, a score of each head that takes part in its
softmax, and windows in most layers, which alone rotate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3_moe
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import read_experts, shared_rows
from ingot.convert.weights import OneOf, Row, Take


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a FlintForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=262144, kv_heads=4, head_dim=128)
    layers = model.num_layers
    usual = [not (layer < 2 or layer % 4 == 1 or layer == layers - 1) for layer in range(layers)]
    windows = windows_by_type(section, layers, read_window(section, 513), usual)
    plain = qwen3_moe.read_dense_layers(section, layers, usual=(0, 1))
    moe = read_experts(
        section,
        experts=256,
        per_token=6,
        intermediate_size=section.integer("moe_intermediate_size", 512, minimum=1),
        normalized=section.boolean("norm_topk_prob", True),
        dense_layers=plain,
        known=("shared_expert_intermediate_size",),
    )
    shared = section.integer("shared_expert_intermediate_size", 1024, minimum=1)
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        attention_sinks=True,
        windows=windows,
        still_layers=tuple(layer for layer in range(layers) if not (windows and windows[layer])),
        moe=None if len(plain) == layers else dataclasses.replace(moe, score=RouterScore.SIGMOID, shared_size=shared),
    )


_ATTN = "model.layers.{i}.self_attn"
_SINKS = OneOf((Take(f"{_ATTN}.softmax_offset"), Take(f"{_ATTN}.sinks")))

FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    name="flint",
    models="Flint",
    read=read,
    rows=(
        *qwen3_moe.FAMILY.rows,
        Row("layers.{i}/attn/sinks/weight", _SINKS),
        *shared_rows("model.layers.{i}.mlp.shared_expert"),
    ),
    nullable=("layer_types", "mlp_only_layers"),
    tiny={
        **qwen3_moe.FAMILY.tiny,
        "model_type": "flint",
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_only_layers": [0],
        "sliding_window": 16,
        "shared_expert_intermediate_size": 44,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
