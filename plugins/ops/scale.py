"""An activation times a number: of branches before they join the residual stream, and of logits."""

import numpy as np

from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y = factor * x, in float32"""
    return (np.float32(call.attrs["factor"]) * call.required(0),)


OP = Op(
    name="scale",
    inputs=("x",),
    outputs=("y",),
    attrs={"factor": float},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    in_place=((0, 0),),
    monotone=True,
    overwrites=True,
)
