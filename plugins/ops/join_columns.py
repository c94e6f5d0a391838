"""Rows side by side: what products of several weights make, for an op that takes it as that of one."""

import numpy as np

from ingot.plugins.op import Array, Call, Op

MOST = 3  # inputs


def reference(call: Call) -> tuple[Array, ...]:
    """y = (a, b), or (a, b, c), column after column"""
    parts = [each for each in (call.required(0), call.required(1), call.optional(2)) if each is not None]
    return (np.concatenate(parts, axis=1),)


OP = Op(
    name="join_columns",
    inputs=("a", "b", "c?"),
    outputs=("y",),
    attrs={},
    out_cols=lambda cols, attrs: (sum(each or 0 for each in cols),),
    reference=reference,
)
