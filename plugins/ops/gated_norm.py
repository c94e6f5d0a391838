"""RMS norm of groups of columns, times the activation of a gate, before or after it."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS, sigmoid
from ingot.plugins.attributes import LARGEST, between, is_flag, not_negative, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal

_GATES = {"silu": ACTIVATIONS["silu"], "sigmoid": sigmoid}


def reference(call: Call) -> tuple[Array, ...]:
    """norm_first: y = norm(x) * weight * activation(gate); else y = norm(x * activation(gate)) * weight

    norm(x) = x / sqrt(mean(x^2) + eps) over each run of so many `columns`; the weight has a number for each column of
    a run, or for each column.
    """
    x, gate, weight, attrs = call.required(0), call.required(1), call.required(2), call.attrs
    group = int(attrs["columns"])
    gates = _GATES[str(attrs["activation"])](gate).astype(np.float64)
    total = x.astype(np.float64) * (1 if attrs["norm_first"] else gates)
    runs = total.reshape(len(x), -1, group)
    normal = runs / np.sqrt((runs**2).mean(axis=-1, keepdims=True) + float(attrs["eps"]))
    scaled = normal.reshape(len(x), -1, len(weight)) * weight
    y = scaled.reshape(x.shape) * (gates if attrs["norm_first"] else 1)
    return (y.astype(np.float32),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Groups of the same size, and as many gates as columns."""
    (cols,), group = shapes[0] or (0,), int(attrs["columns"])
    if cols % group:
        return f"{cols} columns are not a multiple of groups of {group}"
    if shapes[2] not in (None, (group,), (cols,)):
        return f"weight has shape {shapes[2]} instead of ({group},), one group, or ({cols},), all columns"
    return unequal("gate", shapes[1], cols)


OP = Op(
    name="gated_norm",
    inputs=("x", "gate", "weight"),  # [rows, n], [rows, n], [group] or [n]
    outputs=("y",),  # [rows, n]
    attrs={"eps": float, "columns": int, "norm_first": int, "activation": str},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        "eps": not_negative,
        "columns": between(1, LARGEST),
        "norm_first": is_flag,
        "activation": one_of(*_GATES),
    },
    vectors=(2,),
    in_place=((0, 0), (0, 1)),
    overwrites=True,
)
