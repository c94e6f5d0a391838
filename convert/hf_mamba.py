"""How config.json and the files of Hugging Face spell Mamba 2 beside or instead of attention."""

import numpy as np

from ingot.configs.mixers import Mamba2Config
from ingot.configs.read import Section
from ingot.convert.family import takes
from ingot.convert.weights import KeyGroups, Row, Take
from ingot.errors import ConfigError, UnsupportedModelError

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


def read_mamba(section: Section, inner: int) -> Mamba2Config:
    """Mamba 2 of `inner` columns; defaults are those of transformers. Without a norm, and without a bias behind it."""
    heads, groups = (section.integer(f"mamba_n_{x}", usual, minimum=1) for x, usual in (("heads", 128), ("groups", 1)))
    automatic = section.has("mamba_d_head") and section.raw("mamba_d_head") == "auto"
    dim = inner // heads if automatic else section.integer("mamba_d_head", inner // heads, minimum=1)
    if dim * heads != inner or heads % groups or inner % groups:
        raise ConfigError(
            "the sizes of the Mamba 2 heads do not agree",
            where=section.place("mamba_n_heads"),
            expected=f"heads x head size = {inner}; {heads} heads and {inner} columns divisible by {groups} groups",
            got=f"{heads} heads x {dim} = {heads * dim}",
        )
    least, most = read_step_bounds(section)
    return Mamba2Config(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state_dim=section.integer("mamba_d_state", 256, minimum=1),
        conv_width=section.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=section.boolean("mamba_conv_bias", True),
        bias=section.boolean("mamba_proj_bias", False),
        out_bias=False,
        norm_groups=0,
        least_step=least,
        most_step=most,
    )


def require_silu(section: Section, activation: str) -> None:
    """Raise UnsupportedModelError where a model whose Mamba 2 has the activation of its MLPs has another one."""
    if activation != "silu":
        raise UnsupportedModelError(
            "hidden_act of a Mamba 2 layer is not supported",
            where=section.place("hidden_act"),
            expected="silu",
            got=activation,
        )


def read_step_bounds(section: Section) -> tuple[float, float]:
    """The least step, and the most, 0 where it is infinite, for which transformers writes an object."""
    said = section.has("time_step_limit") or section.is_null("time_step_limit")
    given = section.raw("time_step_limit") if said else [0.0, {"__float__": "Infinity"}]
    values = [_number(each) for each in given] if isinstance(given, list) else []
    if len(values) != 2 or values[0] is None or values[1] is None or not 0 <= values[0] < values[1]:
        raise ConfigError(
            "time_step_limit has a wrong value",
            where=section.place("time_step_limit"),
            expected="a list of two numbers, the least and the greatest time step",
            got=repr(given)[:200],
        )
    return values[0], values[1] if values[1] <= float(np.finfo(np.float32).max) else 0.0


def _number(value: object) -> float | None:
    if value == {"__float__": "Infinity"}:
        return np.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def mamba_rows(block: str) -> tuple[Row, ...]:
    """Where the weights of a layer's Mamba 2 come from, which the files call `block`."""
    parts = {"weight": ("z", "xbc", "dt"), "bias": ("z", "xbc", "dt_in")}
    return (
        *takes({f"layers.{{i}}/mamba/{ours}": f"{block}.{theirs}" for ours, theirs in _TAKEN.items()}),
        *(
            Row(f"layers.{{i}}/mamba/{name}/{kind}", KeyGroups(Take(f"{block}.in_proj.{kind}"), _IN, (part,)))
            for kind, names in parts.items()
            for part, name in enumerate(names)
        ),
    )
