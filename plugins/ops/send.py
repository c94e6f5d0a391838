"""Rows that leave a pipeline stage: the rank at the same place of the next stage gets them (`recv`)."""

from collections.abc import Sequence

from ingot.plan import Rows
from ingot.plugins.attributes import between
from ingot.plugins.op import MOST_RANKS, Array, Op, alone

MOST_MESSAGES = 64  # of a stage to the next one, in one step


def reference(values: Sequence[Array]) -> Array:
    """What `recv` gives for what `send` has taken: the same numbers. values: one, of the stage before"""
    (value,) = values
    return value.copy()


OP = Op(
    name="send",
    inputs=("x",),  # [tokens, columns]
    outputs=(),
    attrs={"stage": int, "stages": int, "message": int},  # its own, of how many; the number of what it sends
    out_cols=lambda cols, attrs: (),
    reference=alone,
    transfer=reference,
    rows=Rows.TOKENS,
    of_tokens=True,
    attr_rules={
        "stage": between(0, MOST_RANKS - 2),
        "stages": between(2, MOST_RANKS),
        "message": between(0, MOST_MESSAGES - 1),
    },
)
