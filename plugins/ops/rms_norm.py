"""Root-mean-square normalisation over the hidden dimension, after an optional residual addition."""

import numpy as np

from ingot.plugins.attributes import not_negative
from ingot.plugins.op import Array, Call, Op, as_wide_as_first


def reference(call: Call) -> tuple[Array, ...]:
    """sum = x + residual; y = sum / sqrt(mean(sum^2) + eps) * weight"""
    x, weight, residual = call.required(0), call.required(1), call.optional(2)
    total = x if residual is None else x + residual
    mean_square = np.mean(total.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return (total / np.sqrt(mean_square + call.attrs["eps"]) * weight).astype(np.float32), total


OP = Op(
    name="rms_norm",
    inputs=("x", "weight", "residual?"),  # [rows, hidden], [hidden], [rows, hidden]
    outputs=("y", "sum?"),  # both [rows, hidden]; sum may be the residual's buffer (in place)
    attrs={"eps": float},
    out_cols=lambda cols, attrs: (cols[0] or 0, cols[0] or 0),
    reference=reference,
    size_problem=as_wide_as_first("weight", "residual"),
    attr_rules={"eps": not_negative},
    vectors=(1,),
    residual=2,
    norms=True,
    in_place=((1, 2),),
    overwrites=True,
)
