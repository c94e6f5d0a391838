"""What a layer has made joins its residual streams (AltUp, arXiv:2301.13310)."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import between, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.ops.mix_streams import MOST


def reference(call: Call) -> tuple[Array, ...]:
    """With coefficients y[t, i] = x[t, i] + (1 + coefs[t, i]) * (made[t] - x[t, active]); without, the stream `active`
    stays, and the others are y[t, i] = x[t, i] + made[t]."""
    x, made, coefs, attrs = call.required(0), call.required(1), call.optional(2), call.attrs
    streams, active = x.reshape(len(x), int(attrs["streams"]), -1), int(attrs["active"])
    if coefs is None:
        total = streams + made[:, None]
        total[:, active] = streams[:, active]
    else:
        total = streams + (1 + coefs[:, :, None]) * (made - streams[:, active])[:, None]
    return (total.reshape(x.shape).astype(np.float32),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """What is added is as wide as a stream, and each stream has a coefficient."""
    (cols,), count = shapes[0] or (0,), int(attrs["streams"])
    if cols % count:
        return f"{cols} columns are no {count} streams of one width"
    if int(attrs["active"]) >= count:
        return f"stream {attrs['active']} is none of {count}"
    return unequal("made", shapes[1], cols // count) or unequal("coefs", shapes[2], count)


OP = Op(
    name="add_to_streams",
    inputs=("x", "made", "coefs?"),  # [rows, streams * n], [rows, n], [rows, streams]
    outputs=("y",),  # [rows, streams * n]
    attrs={"streams": int, "active": int},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={"streams": between(1, MOST + 1), "active": not_negative},
    decisive=(2,),
)
