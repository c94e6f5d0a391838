"""The places of rows sorted by the experts that they take, so that kernels multiply the rows of an expert together."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, between
from ingot.plugins.op import Array, Call, Op, Shapes

COLUMNS = 5  # of the lists, for each slot: its place, and four numbers that kernels keep for themselves


def reference(call: Call) -> tuple[Array, ...]:
    """The lists begin with row * slots + slot of every slot of every row: those that take expert 0, in their order,
    then those of expert 1, and so on. Behind them kernels note who multiplies which; the reference has zeros there."""
    ids = call.required(0)
    lists = np.zeros((len(ids), COLUMNS * ids.shape[1]), np.float32)
    lists.reshape(-1)[: ids.size] = np.argsort(ids.reshape(-1), kind="stable")
    return (lists,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A row takes different experts."""
    (slots,), experts = shapes[0] or (0,), int(attrs["experts"])
    return None if slots <= experts else f"a row cannot take {slots} of {experts} experts"


OP = Op(
    name="sort_by_expert",
    inputs=("ids",),  # [rows, slots]
    outputs=("lists",),  # int32 [rows, COLUMNS * slots], of all rows together
    attrs={"experts": int},
    out_cols=lambda cols, attrs: (COLUMNS * (cols[0] or 0),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={"experts": between(1, LARGEST)},
    lists=True,
)
