"""Keeps some columns of each row: the input of one part of a product whose sum is made in parts."""

from collections.abc import Mapping

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, between, not_negative
from ingot.plugins.op import Array, Call, Op, Shapes


def reference(call: Call) -> tuple[Array, ...]:
    """y[r, g * count + i] = x[r, g * of + first + i] for i below count: of each `of` columns those from `first` on"""
    x, (of, first, count) = call.required(0), _range(call.attrs)
    taken: Array = x.reshape(len(x), -1, of)[:, :, first : first + count].reshape(len(x), -1)
    return (taken,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The columns are whole groups of `of`, which hold all that are taken."""
    (cols,), (of, first, count) = shapes[0] or (0,), _range(attrs)
    if cols % of or first + count > of:
        return f"columns {first} to {first + count} of each {of} cannot be taken out of {cols}"
    return None


def _range(attrs: Mapping[str, Attr]) -> tuple[int, int, int]:
    return int(attrs["of"]), int(attrs["first"]), int(attrs["count"])


OP = Op(
    name="take_columns",
    inputs=("x",),  # [rows, groups * of]
    outputs=("y",),  # [rows, groups * count]
    attrs={"of": int, "first": int, "count": int},
    out_cols=lambda cols, attrs: ((cols[0] or 0) // int(attrs["of"]) * int(attrs["count"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={"of": between(1, LARGEST), "first": not_negative, "count": between(1, LARGEST)},
)
