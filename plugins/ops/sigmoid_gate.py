"""An activation times the sigmoid of a gate: what leaves an attention layer that has an output gate."""

from ingot.plugins.activations import sigmoid
from ingot.plugins.op import Array, Call, Op, as_wide_as_first


def reference(call: Call) -> tuple[Array, ...]:
    """y = x * sigmoid(gate)"""
    return (call.required(0) * sigmoid(call.required(1)),)


OP = Op(
    name="sigmoid_gate",
    inputs=("x", "gate"),
    outputs=("y",),
    attrs={},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=as_wide_as_first("gate"),
    in_place=((0, 0),),
    overwrites=True,
)
