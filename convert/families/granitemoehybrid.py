"""Granite 4 H: a Granite with Mamba 2 in most layers, and experts beside one that all tokens share in some models."""

import dataclasses
from collections.abc import Collection

from ingot.configs.mixers import Mamba2Config
from ingot.configs.model import ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import granite, granitemoe
from ingot.convert.hf_config import mixer_layers
from ingot.convert.hf_mamba import mamba_rows, read_mamba, require_silu
from ingot.convert.hf_moe import read_experts
from ingot.convert.weights import Row, Split, Take
from ingot.errors import UnsupportedModelError

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # older files' names


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GraniteMoeHybridForCausalLM; defaults are those of transformers."""
    model = granite.read_granite(section, intermediate=11008)
    positions = section.text("position_embedding_type", "nope")
    if positions not in ("rope", "nope"):
        raise UnsupportedModelError(
            f"position_embedding_type {positions!r} is not supported",
            where=section.place("position_embedding_type"),
            expected="rope or nope",
            got=positions,
        )
    require_silu(section, model.activation)
    layers = range(model.num_layers)
    shared = section.integer("shared_intermediate_size", 1024, minimum=1)
    return dataclasses.replace(
        model,
        intermediate_size=shared,
        moe=_read_experts(section, model.intermediate_size, shared),
        still_layers=() if positions == "rope" else tuple(layers),
        mixer=_read_mamba(section, model.hidden_size),
        mixer_layers=mixer_layers(section, model.num_layers, "linear_attention", (), other_names=_KINDS),
    )


def _read_mamba(section: Section, hidden: int) -> Mamba2Config:
    mamba = read_mamba(section, section.integer("mamba_expand", 2, minimum=1) * hidden)
    return dataclasses.replace(mamba, out_bias=mamba.bias, norm_groups=mamba.groups)


def _read_experts(section: Section, inner: int, shared: int) -> MoeConfig | None:
    """None where the MLP that all tokens share is the only one."""
    if not section.integer("num_local_experts", 8):
        section.has("num_experts_per_tok")  # of none
        return None
    moe = read_experts(section, experts=8, per_token=2, intermediate_size=inner, normalized=True)
    return dataclasses.replace(moe, shared_size=shared)


_LAYER = "model.layers.{i}"
_SHARED = f"{_LAYER}.shared_mlp"
_MLP_ROWS = tuple(
    Row(f"layers.{{i}}/{path}/{name}/weight", expr)
    for path in ("mlp", "moe/shared")
    for name, expr in (
        ("gate", Split(Take(f"{_SHARED}.input_linear.weight"), 2, 0)),
        ("up", Split(Take(f"{_SHARED}.input_linear.weight"), 2, 1)),
        ("down", Take(f"{_SHARED}.output_linear.weight")),
    )
)

FAMILY = dataclasses.replace(
    granite.FAMILY,
    name="granitemoehybrid",
    models="Granite 4 H 350M, 1B, Tiny and Small",
    read=read,
    rows=tuple(row for row in granitemoe.FAMILY.rows if "/mlp/" not in row.name)
    + mamba_rows(f"{_LAYER}.mamba")
    + _MLP_ROWS,
    nullable=("num_key_value_heads", "position_embedding_type", "layer_types"),
    tiny={
        **granite.FAMILY.tiny,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 44,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "position_embedding_type": "rope",
    },
)
