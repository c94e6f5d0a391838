"""Sum of an activation and another whose rows have a gate each: what an expert that all tokens share adds."""

from collections.abc import Mapping

from ingot.plan import Attr
from ingot.plugins.activations import sigmoid
from ingot.plugins.op import Array, Call, Op, Shapes, unequal


def reference(call: Call) -> tuple[Array, ...]:
    """y = a + b * sigmoid(gate)"""
    return (call.required(0) + call.required(1) * sigmoid(call.required(2)),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """b is as wide as a; a row has one gate."""
    (cols,) = shapes[0] or (0,)
    return unequal("b", shapes[1], cols) or unequal("gate", shapes[2], 1)


OP = Op(
    name="add_gated",
    inputs=("a", "b", "gate"),  # [rows, cols] twice, [rows, 1]
    outputs=("y",),
    attrs={},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    in_place=((0, 0),),
    decisive=(2,),
)
