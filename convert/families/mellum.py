"""Mellum 2: a Qwen 3 with experts and windows in some layers, whose rotation is another."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3_moe
from ingot.convert.families.gemma3_text import read_ropes
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import dense_layers, read_experts
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MellumForCausalLM; defaults are those of transformers, which reads no older spelling of
    rotations."""
    for key in ("rope_scaling", "rope_theta"):
        if section.has(key):
            raise ConfigError(
                f"{key} is an older key, which transformers ignores for this model",
                where=section.place(key),
                expected="rope_parameters with objects full_attention and sliding_attention",
            )
    model = llama.read_llama(section, positions=131072, kv_heads=4, head_dim=128, one_rope=False)
    layers = model.num_layers
    windows = windows_by_type(section, layers, read_window(section, 1024), [False] * layers)
    rope, local_rope = read_ropes(section, model, theta=5e5, local_theta=1e4, local_key=None)
    plain = dense_layers(section, layers, usual=0)
    for key in ("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"):
        section.has(key)  # of draft tokens
    moe = read_experts(
        section,
        experts=64,
        per_token=8,
        intermediate_size=section.integer("moe_intermediate_size", 896, minimum=1),
        normalized=section.boolean("norm_topk_prob", True),
        dense_layers=plain,
    )
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        windows=windows,
        rope=rope,
        local_rope=local_rope if any(windows) else None,
        moe=None if len(plain) == layers else moe,
    )


FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    name="mellum",
    models="Mellum 2 12B-A2.5B",
    read=read,
    drafts="mtp.",
    layer_ropes=True,
    nullable=("sliding_window", "layer_types", "mlp_layer_types"),
    tiny={
        **{key: value for key, value in qwen3_moe.FAMILY.tiny.items() if key != "mlp_only_layers"},
        "model_type": "mellum",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "sliding_window": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
