"""Bends the logits into (-cap, cap)."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.op import Array, Call, Op, Shapes


def reference(call: Call) -> tuple[Array, ...]:
    """y = cap * tanh(x / cap)"""
    cap = float(call.attrs["cap"])
    return ((cap * np.tanh(call.required(0).astype(np.float64) / cap)).astype(np.float32),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The cap must be above 0."""
    cap = float(attrs["cap"])
    return None if cap > 0 else f"a soft cap of {cap:g} is not above 0"


OP = Op(
    name="softcap",
    inputs=("x",),
    outputs=("y",),
    attrs={"cap": float},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    in_place=((0, 0),),
    monotone=True,
    overwrites=True,
)
