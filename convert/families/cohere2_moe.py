"""Command A+: a Cohere 2 with experts, whose first layers may have a plain MLP instead and rotate without a window."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig, Norm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import cohere, cohere2
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import dense_layers, expert_rows, read_experts, shared_rows
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Cohere2MoeForCausalLM; defaults are those of transformers."""
    model = cohere.read_cohere(section, theta=10000.0, head_dim=128)
    layers, inner = model.num_layers, model.intermediate_size
    first = min(section.integer("first_k_dense_replace", 0), layers)
    dense = dense_layers(section, layers, usual=first)
    every = section.integer("sliding_window_pattern", 4, minimum=1)
    every_first = section.integer("prefix_dense_sliding_window_pattern", 1, minimum=1)
    usual = [(layer + 1) % every_first != 0 for layer in range(first)]
    usual += [(layer + 1) % every != 0 for layer in range(layers - first)]
    windows = windows_by_type(section, layers, read_window(section, 4096), usual)
    rotating = dense if every_first == 1 else ()
    still = [layer for layer in range(layers) if not (windows and windows[layer]) and layer not in rotating]
    section.has("num_nextn_predict_layers")  # how many layers the files hold for later tokens
    if section.has("rms_norm_eps"):
        model = dataclasses.replace(model, norm=Norm.RMS, norm_eps=section.number("rms_norm_eps", above=0))
    wide = section.has("prefix_dense_intermediate_size")
    moe = _experts(section, inner, dense)
    return dataclasses.replace(
        model,
        windows=windows,
        still_layers=tuple(still),
        intermediate_size=section.integer("prefix_dense_intermediate_size", minimum=1) if wide else inner,
        moe=None if len(dense) == layers else moe,
    )


def _experts(section: Section, inner: int, dense: tuple[int, ...]) -> MoeConfig:
    """A softmax over the taken experts alone is one over all of them, divided by its sum. What shared experts make is
    added to what the taken ones make, or both are averaged."""
    score = _one_of(section, "expert_selection_fn", ("softmax", "sigmoid"))
    normalized = section.boolean("norm_topk_prob", True)
    shared = section.integer("num_shared_experts", 0)
    combined = _one_of(section, "shared_expert_combination_strategy", ("average", "sum"))
    share = 0.5 if shared and combined == "average" else 1.0
    moe = read_experts(
        section,
        experts=8,
        per_token=2,
        intermediate_size=inner,
        normalized=normalized or score == "softmax",
        dense_layers=dense,
        known=("num_shared_experts", "first_k_dense_replace"),
    )
    return dataclasses.replace(
        moe, score=RouterScore(score), scale=share, shared_size=inner * shared, shared_scale=share
    )


def _one_of(section: Section, key: str, known: tuple[str, ...]) -> str:
    """The first is the default."""
    found = section.text(key, known[0])
    if found not in known:
        raise UnsupportedModelError(
            f"{key} {found!r} is not supported", where=section.place(key), expected=", ".join(known), got=found
        )
    return found


_BLOCK = "model.layers.{i}.mlp"

FAMILY = dataclasses.replace(
    cohere2.FAMILY,
    name="cohere2_moe",
    models="Command A+",
    read=read,
    rows=(
        *cohere2.FAMILY.rows,
        *expert_rows(_BLOCK, gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_rows(f"{_BLOCK}.shared_experts"),
    ),
    drafts="model.layers.{n}.",
    nullable=(
        *("num_key_value_heads", "layer_types", "mlp_layer_types", "prefix_dense_intermediate_size", "rms_norm_eps"),
    ),
    tiny={
        **cohere2.FAMILY.tiny,
        "model_type": "cohere2_moe",
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 84,
        "intermediate_size": 20,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
    },
)
