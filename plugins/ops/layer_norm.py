"""Layer normalisation over the hidden dimension, after an optional residual addition."""

import numpy as np

from ingot.plugins.attributes import not_negative
from ingot.plugins.op import Array, Call, Op, as_wide_as_first


def reference(call: Call) -> tuple[Array, ...]:
    """sum = x + residual; y = (sum - mean) / sqrt(variance + eps) * weight + bias"""
    x, weight, bias, residual = call.required(0), call.required(1), call.optional(2), call.optional(3)
    total = x if residual is None else x + residual
    wide = total.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + call.attrs["eps"]) * weight
    return (y if bias is None else y + bias).astype(np.float32), total


OP = Op(
    name="layer_norm",
    inputs=("x", "weight", "bias?", "residual?"),  # [rows, hidden], [hidden], [hidden], [rows, hidden]
    outputs=("y", "sum?"),  # both [rows, hidden]; sum may be the residual's buffer (in place)
    attrs={"eps": float},
    out_cols=lambda cols, attrs: (cols[0] or 0, cols[0] or 0),
    reference=reference,
    size_problem=as_wide_as_first("weight", "bias", "residual"),
    attr_rules={"eps": not_negative},
    vectors=(1, 2),
    residual=3,
    norms=True,
    in_place=((1, 3),),
    overwrites=True,
)
