"""Qwen 3 with experts: a Qwen 3 whose MLPs, or those of some layers, are mixtures of experts."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3
from ingot.convert.hf_config import read_window, require_values
from ingot.convert.hf_moe import expert_rows, read_experts
from ingot.errors import ConfigError

_OF_ALL = {"qkv_bias": False, "use_qk_norm": True}  # some files say what is so in every model of this family


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen3MoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=32768, kv_heads=4)
    require_values(section, _OF_ALL)
    section.has("max_window_layers")  # of the dense families; here every layer has the window
    window = read_window(section, 4096) if section.boolean("use_sliding_window", False) else 0
    section.has("sliding_window")  # switched off, it has no effect
    dense_layers = read_dense_layers(section, model.num_layers)
    moe = read_experts(
        section,
        experts=128,
        per_token=8,
        intermediate_size=section.integer("moe_intermediate_size", 768, minimum=1),
        normalized=section.boolean("norm_topk_prob", False),
        dense_layers=dense_layers,
    )
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        windows=(window,) * model.num_layers if window else (),
        moe=None if len(dense_layers) == model.num_layers else moe,
    )


def read_dense_layers(section: Section, layers: int, usual: Collection[int] = ()) -> tuple[int, ...]:
    """Those of mlp_only_layers, and all but every decoder_sparse_step-th. usual: where mlp_only_layers is absent."""
    step, listed = section.integer("decoder_sparse_step", 1, minimum=1), section.numbers("mlp_only_layers")
    named = listed if section.has("mlp_only_layers") else usual
    if not all(isinstance(each, int) and each >= 0 for each in named):
        raise ConfigError(
            "mlp_only_layers has a wrong value",
            where=section.place("mlp_only_layers"),
            expected="a list of layers",
            got=repr(list(named))[:200],
        )
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    read=read,
    rows=qwen3.FAMILY.rows + expert_rows("model.layers.{i}.mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    nullable=("sliding_window", "mlp_only_layers"),
    tiny={
        **qwen3.FAMILY.tiny,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
)
