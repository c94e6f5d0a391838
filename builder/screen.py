"""What a screened lm_head adds to an engine: two steps, and the weights that they read (plugins/ops/screen.py).

lm_head.screen   its w8 codes in 4 bits, in panels                     half its bytes
lm_head.dither   what was added before they were cut down
lm_head.table    the same w8 rows, one after the other: the token table where that is the same weight
"""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from ingot.builder.graph import producer
from ingot.builder.pack import WeightUse
from ingot.builder.select import choose_kernel
from ingot.dtypes import DType
from ingot.errors import BuildError, NoKernelError
from ingot.plan import Attr
from ingot.plugins.ops.screen import GROUP, dither
from ingot.plugins.target import Target

PRODUCT_ATTRS: Mapping[str, Attr] = {"activation": "none", "gated": 0, "activations": "int8", "group": GROUP}


def screen_uses(head: WeightUse) -> tuple[WeightUse, WeightUse, WeightUse]:
    """Codes, dither and table for the weight of lm_head."""
    name, k = head.name.rsplit(".", 1)[0], head.shape[1]
    codes = WeightUse(
        name=f"{name}.screen",
        tensor=head.tensor,
        dtype=DType.W4,
        shape=head.shape,
        panels=True,
        group=GROUP,
        screens=True,
    )
    drawn = gs.Constant(f"{name}.dither", values=dither(k))
    return (
        codes,
        WeightUse(name=drawn.name, tensor=drawn, dtype=DType.F32, shape=(k,)),
        WeightUse(name=f"{name}.table", tensor=_before_widening(head.tensor), dtype=DType.W8, shape=head.shape),
    )


def _before_widening(tensor: gs.Tensor) -> gs.Tensor:
    """The values are read as float32 either way; so the token table is found to be the same weight."""
    node = producer(tensor)
    if node is None or node.op != "Cast" or DType.from_onnx(node.attrs["to"]) is not DType.F32:
        return tensor
    return node.inputs[0]


def screen_kernels(target: Target) -> tuple[str, str]:
    """Kernels of the product and of the choice. Raises BuildError where the target has none."""
    try:
        return choose_kernel(target, "matmul", "w4a8"), choose_kernel(target, "screen", "w8")
    except NoKernelError as error:
        raise BuildError(
            f"{target.name} screens no lm_head",
            where="--screen_lm_head",
            expected="a CPU target",
            got=error.what,
            hint="leave --screen_lm_head out, or build for CPUs and GPUs in two calls",
        ) from error


def require_screenable(op: str, attrs: Mapping[str, Attr], extras: bool, head: WeightUse | None) -> None:
    """The last step's op, attributes, whether it adds a bias or residual, and its weight. Raises BuildError."""
    got = None
    if op != "matmul" or head is None:
        got = f"the logits come from {op}"
    elif head.dtype is not DType.W8:
        got = f"lm_head is {head.precision}"
    elif attrs["activations"] != "int8":
        got = f"lm_head takes {attrs['activations']} activations"
    elif extras or attrs["activation"] != "none" or attrs["gated"]:
        got = "lm_head has a bias, an activation or something to add"
    if got is not None:
        raise BuildError(
            "this lm_head cannot be screened",
            where="--screen_lm_head",
            expected="a product of w8 weights with int8 activations, and nothing behind it",
            got=got,
            hint="give --precision w4g128 and --activations int8, or leave --screen_lm_head out",
        )
