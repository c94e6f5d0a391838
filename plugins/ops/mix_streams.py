"""Each of several residual streams takes something of all of them (AltUp, arXiv:2301.13310)."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import between
from ingot.plugins.op import Array, Call, Op, Shapes, unequal

MOST = 16  # streams


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, i] = x[t, i] + sum over j of coefs[t, i * streams + j] * x[t, j], of streams side by side"""
    x, coefs, count = call.required(0), call.required(1), int(call.attrs["streams"])
    streams = x.reshape(len(x), count, -1).astype(np.float64)
    mixed = streams + coefs.reshape(len(x), count, count).astype(np.float64) @ streams
    return (mixed.reshape(x.shape).astype(np.float32),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Streams of the same width, and a coefficient for each pair."""
    (cols,), count = shapes[0] or (0,), int(attrs["streams"])
    if cols % count:
        return f"{cols} columns are no {count} streams of one width"
    return unequal("coefs", shapes[1], count * count)


OP = Op(
    name="mix_streams",
    inputs=("x", "coefs"),  # [rows, streams * n], [rows, streams * streams]
    outputs=("y",),  # [rows, streams * n]
    attrs={"streams": int},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={"streams": between(1, MOST + 1)},
    decisive=(1,),
)
