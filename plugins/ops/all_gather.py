"""Columns of all ranks of a tensor parallel group side by side, which every rank gets."""

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, between
from ingot.plugins.op import MOST_RANKS, Array, Op, Shapes, alone


def reference(values: Sequence[Array]) -> Array:
    """values: of all ranks, in their order"""
    return np.concatenate(values, axis=1)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """No rank has more columns than all of them."""
    (cols,), total = shapes[0] or (0,), int(attrs["columns"])
    return f"{cols} columns of a rank are more than the {total} of all" if cols > total else None


OP = Op(
    name="all_gather",
    inputs=("x",),  # [rows, columns of this rank]
    outputs=("y",),  # [rows, columns]
    attrs={"ranks": int, "columns": int},
    out_cols=lambda cols, attrs: (int(attrs["columns"]),),
    reference=alone,
    collective=reference,
    size_problem=size_problem,
    attr_rules={"ranks": between(2, MOST_RANKS), "columns": between(1, LARGEST)},
)
