"""Rows of a token table, plus rows of a position table where the model learns positions."""

import numpy as np

from ingot.plan import Rows
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """out[t] = table[ids[t]] * scale (+ position_table[position of t]); a row of a w8 table is scale[row] * q[row]"""
    out = call.weight(0).rows(call.batch.ids) * np.float32(call.attrs["scale"])
    if call.inputs[1] is not None:
        out = out + call.weight(1).rows(call.positions())
    return (out,)


OP = Op(
    name="embedding",
    inputs=("table", "position_table?"),  # [vocab, hidden], [positions, hidden]
    outputs=("out",),  # [tokens, hidden]
    attrs={"scale": 1.0},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    rows=Rows.TOKENS,
)
