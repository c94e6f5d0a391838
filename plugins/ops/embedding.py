"""Rows of a token table, plus rows of a position table where the model learns positions."""

from ingot.plan import Rows
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """out[t] = table[ids[t]] (+ position_table[position of t])"""
    out = call.required(0)[call.batch.ids]
    if (position_table := call.inputs[1]) is not None:
        out = out + position_table[call.positions()]
    return (out,)


OP = Op(
    name="embedding",
    inputs=("table", "position_table?"),  # [vocab, hidden], [positions, hidden]
    outputs=("out",),  # [tokens, hidden]
    attrs={},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    rows=Rows.TOKENS,
)
