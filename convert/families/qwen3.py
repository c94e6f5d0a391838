"""Qwen 3: a Llama whose queries and keys are normed head by head."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.families.qwen2 import read_windows
from ingot.convert.family import takes


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen3ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=32, head_dim=128)
    return dataclasses.replace(model, qk_norm=QkNorm.HEAD, windows=read_windows(section, model.num_layers))


QK_NORMS = takes(
    {f"layers.{{i}}/attn/{x}_norm/weight": f"model.layers.{{i}}.self_attn.{x}_norm.weight" for x in ("q", "k")}
)

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3",
    models="Qwen3, dense",
    read=read,
    rows=llama.FAMILY.rows + QK_NORMS,
    nullable=("num_key_value_heads", "sliding_window", "layer_types"),
    tiny={**llama.FAMILY.tiny, "model_type": "qwen3", "head_dim": 24},
)
