"""Granite 4 H: a Granite with Mamba 2 in most layers, and experts beside one that all tokens share in some models."""

import dataclasses
from collections.abc import Collection

import numpy as np

from ingot.configs.model import Activation, Mamba2Config, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import granite, granitemoe
from ingot.convert.family import takes
from ingot.convert.hf_config import mixer_layers
from ingot.convert.hf_moe import read_experts
from ingot.convert.weights import KeyGroups, Row, Split, Take
from ingot.errors import ConfigError, UnsupportedModelError

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # older files' names


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GraniteMoeHybridForCausalLM; defaults are those of transformers."""
    model = granite.read_granite(section, intermediate=11008)
    positions = section.text("position_embedding_type", "nope")
    if positions not in ("rope", "nope"):
        raise UnsupportedModelError(
            "the positions are not supported", where=section.place("position_embedding_type"), got=positions
        )
    if model.activation is not Activation.SILU:
        raise UnsupportedModelError(
            "the activation of Mamba 2 is not supported", where=section.place("hidden_act"), expected="silu"
        )
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


def _read_experts(section: Section, inner: int, shared: int) -> MoeConfig | None:
    """None where the MLP that all tokens share is the only one."""
    if not section.integer("num_local_experts", 8):
        section.has("num_experts_per_tok")  # of none
        return None
    moe = read_experts(section, experts=8, per_token=2, intermediate_size=inner, normalized=True)
    return dataclasses.replace(moe, shared_size=shared)


def _read_mamba(section: Section, hidden: int) -> Mamba2Config:
    inner = section.integer("mamba_expand", 2, minimum=1) * hidden
    heads, groups = (section.integer(f"mamba_n_{x}", usual, minimum=1) for x, usual in (("heads", 128), ("groups", 1)))
    automatic = section.has("mamba_d_head") and section.raw("mamba_d_head") == "auto"
    dim = inner // heads if automatic else section.integer("mamba_d_head", inner // heads, minimum=1)
    if dim * heads != inner or heads % groups or inner % groups:
        raise ConfigError(
            "the heads of Mamba 2 do not fit the model",
            where=section.place("mamba_n_heads"),
            expected=f"{inner} columns, shared evenly by heads and by {groups} groups",
            got=f"{heads} heads of {dim}",
        )
    least, most = _step_bounds(section)
    return Mamba2Config(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state_dim=section.integer("mamba_d_state", 256, minimum=1),
        conv_width=section.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=section.boolean("mamba_conv_bias", True),
        bias=section.boolean("mamba_proj_bias", False),
        norm_groups=groups,
        least_step=least,
        most_step=most,
    )


def _step_bounds(section: Section) -> tuple[float, float]:
    """The least step, and the most, 0 where it is infinite, for which transformers writes an object."""
    said = section.has("time_step_limit") or section.is_null("time_step_limit")
    given = section.raw("time_step_limit") if said else [0.0, {"__float__": "Infinity"}]
    values = [_number(each) for each in given] if isinstance(given, list) else []
    if len(values) != 2 or values[0] is None or values[1] is None or not 0 <= values[0] < values[1]:
        raise ConfigError(
            "a value is not usable",
            where=section.place("time_step_limit"),
            expected="a list of the least and the most step",
            got=repr(given)[:200],
        )
    return values[0], values[1] if values[1] <= float(np.finfo(np.float32).max) else 0.0


def _number(value: object) -> float | None:
    if value == {"__float__": "Infinity"}:
        return np.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_LAYER = "model.layers.{i}"
_IN = ("gate", "mixed", "head")
_TAKEN = {
    "dt/bias": "dt_bias",
    "a_log/weight": "A_log",
    "d/weight": "D",
    "conv/weight": "conv1d.weight",
    "conv/bias": "conv1d.bias",
    "norm/weight": "norm.weight",
    "out/weight": "out_proj.weight",
    "out/bias": "out_proj.bias",
}
MAMBA_ROWS = (
    *takes({f"layers.{{i}}/mamba/{ours}": f"{_LAYER}.mamba.{theirs}" for ours, theirs in _TAKEN.items()}),
    *(
        Row(f"layers.{{i}}/mamba/{name}/{kind}", KeyGroups(Take(f"{_LAYER}.mamba.in_proj.{kind}"), _IN, (part,)))
        for part, name in enumerate(("z", "xbc", "dt"))
        for kind in ("weight", "bias")
        if (name, kind) != ("dt", "bias")
    ),
)
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
    read=read,
    rows=tuple(row for row in granitemoe.FAMILY.rows if "/mlp/" not in row.name) + MAMBA_ROWS + _MLP_ROWS,
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
