"""An activation rounded to 16 bits, for matmuls that take it so, where others read it in float32."""

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plugins.attributes import one_of
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y = the nearest numbers of the type `to`, as the op matmul rounds its inputs."""
    dtype = DType(call.attrs["to"])
    return (to_float32(from_float32(call.required(0), dtype), dtype),)


OP = Op(
    name="cast",
    inputs=("x",),
    outputs=("y",),
    attrs={"to": str},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    attr_rules={"to": one_of("bf16", "f16")},
    rounds=True,
)
