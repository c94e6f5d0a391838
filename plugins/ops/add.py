"""Sum of two activations; used where it cannot join a norm or a product's epilogue."""

from ingot.plugins.op import Array, Call, Op, as_wide_as_first


def reference(call: Call) -> tuple[Array, ...]:
    """y = a + b"""
    return (call.required(0) + call.required(1),)


OP = Op(
    name="add",
    inputs=("a", "b"),
    outputs=("y",),
    attrs={},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=as_wide_as_first("b"),
    in_place=((0, 0),),
    overwrites=True,
)
