"""An activation function by itself, or times a second operand; used where it cannot join a product's epilogue."""

from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.attributes import one_of
from ingot.plugins.op import Array, Call, Op, as_wide_as_first


def reference(call: Call) -> tuple[Array, ...]:
    """y = activation(x) (* up)"""
    y = ACTIVATIONS[str(call.attrs["activation"])](call.required(0))
    up = call.optional(1)
    return (y if up is None else y * up,)


OP = Op(
    name="activation",
    inputs=("x", "up?"),
    outputs=("y",),
    attrs={"activation": str},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=as_wide_as_first("up"),
    attr_rules={"activation": one_of(*ACTIVATIONS)},
    in_place=((0, 0),),
    overwrites=True,
)
