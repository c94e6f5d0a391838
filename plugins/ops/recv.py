"""Rows that a pipeline stage gets from the rank at the same place of the stage before it, which has sent them."""

from ingot.plan import Rows
from ingot.plugins.attributes import LARGEST, between
from ingot.plugins.op import MOST_RANKS, Op, alone
from ingot.plugins.ops import send

OP = Op(
    name="recv",
    inputs=(),
    outputs=("y",),  # [tokens, columns]: what the stage before has sent under this number
    attrs={"stage": int, "stages": int, "message": int, "columns": int},
    out_cols=lambda cols, attrs: (int(attrs["columns"]),),
    reference=alone,
    transfer=send.reference,
    rows=Rows.TOKENS,
    attr_rules={
        "stage": between(1, MOST_RANKS - 1),
        "stages": between(2, MOST_RANKS),
        "message": between(0, send.MOST_MESSAGES - 1),
        "columns": between(1, LARGEST),
    },
)
