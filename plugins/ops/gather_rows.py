"""Keeps the rows whose logits are wanted, so that the last norm and lm_head run for them alone."""

from ingot.plan import Rows
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y[r] = x[logit_rows[r]]"""
    return (call.required(0)[call.integers(1)],)


OP = Op(
    name="gather_rows",
    inputs=("x", "logit_rows"),
    outputs=("y",),
    attrs={},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    batch_inputs={1: 0},
    of_tokens=True,
    copies_rows=True,
    step_name="logit_rows",
    rows=Rows.LOGITS,
)
