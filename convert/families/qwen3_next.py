"""Qwen 3 Next: a Qwen 3.5 with experts whose files store the products of the delta rule by groups of heads."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3_5_moe_text, qwen3_5_text, qwen3_moe
from ingot.convert.hf_moe import read_experts, with_gated_shared_expert
from ingot.convert.weights import KeyGroups, Row, Take
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen3NextForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=2, head_dim=256, partial_rotary=0.25, intermediate=5632)
    if section.boolean("use_sliding_window", False):
        raise UnsupportedModelError(
            "use_sliding_window true is not supported", where=section.place("use_sliding_window"), expected="false"
        )
    dense_layers = qwen3_moe.read_dense_layers(section, model.num_layers)
    moe = read_experts(
        section,
        experts=512,
        per_token=10,
        intermediate_size=section.integer("moe_intermediate_size", 512, minimum=1),
        normalized=section.boolean("norm_topk_prob", True),
        dense_layers=dense_layers,
        known=("shared_expert_intermediate_size",),
    )
    moe = with_gated_shared_expert(section, moe, 512)
    return dataclasses.replace(
        qwen3_5_text.read_hybrid(section, model), moe=None if len(dense_layers) == model.num_layers else moe
    )


_LINEAR = "model.layers.{i}.linear_attn"
_QKVZ, _BA = ("key", "key", "value", "value"), ("head", "head")
_ROWS = (
    Row("layers.{i}/linear/qkv/weight", KeyGroups(Take(f"{_LINEAR}.in_proj_qkvz.weight"), _QKVZ, (0, 1, 2))),
    Row("layers.{i}/linear/z/weight", KeyGroups(Take(f"{_LINEAR}.in_proj_qkvz.weight"), _QKVZ, (3,))),
    Row("layers.{i}/linear/b/weight", KeyGroups(Take(f"{_LINEAR}.in_proj_ba.weight"), _BA, (0,))),
    Row("layers.{i}/linear/dt/weight", KeyGroups(Take(f"{_LINEAR}.in_proj_ba.weight"), _BA, (1,))),
)

FAMILY = dataclasses.replace(
    qwen3_5_moe_text.FAMILY,
    name="qwen3_next",
    models="Qwen3-Next, Qwen3-Coder-Next",
    read=read,
    rows=tuple(row for row in qwen3_5_moe_text.FAMILY.rows if row.name not in {each.name for each in _ROWS}) + _ROWS,
    nullable=("layer_types", "mlp_only_layers"),
    tiny={
        **qwen3_5_moe_text.FAMILY.tiny,
        "model_type": "qwen3_next",
        "intermediate_size": 44,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
)
