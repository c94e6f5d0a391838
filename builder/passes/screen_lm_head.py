"""lm_head becomes a product that may leave out all logits but the best (plugins/ops/screened_matmul.py).

    x ─ matmul(lm_head) ▶ logits        x ─ screened_matmul(lm_head, codes, dither, table) ▶ logits

lm_head.codes    its w8 codes in 4 bits, in panels                     half its bytes
lm_head.dither   what was added before they were cut down
lm_head.table    the same w8 rows, one after the other: the token table where that is the same weight
"""

import dataclasses

import onnx_graphsurgeon as gs

from ingot.builder.graph import producer
from ingot.builder.lower import Lowering
from ingot.builder.pack import WeightUse
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.builder.select import choose_kernel
from ingot.dtypes import DType
from ingot.errors import BuildError, NoKernelError
from ingot.plugins.ops.screened_matmul import GROUP, OP, dither, half_codes
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target

NAME = "screen_lm_head"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScreenLmHead:
    """lowering: gets the weights."""

    lowering: Lowering
    target: Target

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """Raises BuildError where the last step is not a product that can be screened, or the target has no kernel."""
        head = program.steps[-1]
        kernel, estimate = _kernels(self.target)
        use = _screenable(head, self.lowering)
        weights = [self.lowering.add_weight(each) for each in _weights(use)]
        screened = Draft(
            name=head.name,
            op=OP.name,
            kernel=kernel,
            inputs=(*head.inputs[:2], *weights, OP.inputs[-1]),
            outputs=head.outputs,
            attrs={"activations": "int8", "group": 0, "product": head.kernel, "estimate": estimate},
        )
        changed = dataclasses.replace(program, steps=(*program.steps[:-1], screened))
        return changed, PassReport(name=NAME, fired=1)


def _kernels(target: Target) -> tuple[str, str]:
    try:
        return choose_kernel(target, OP.name, "w8a8"), choose_kernel(target, "matmul", "w4a8")
    except NoKernelError as error:
        raise BuildError(
            f"--screen_lm_head is not supported on {target.name}",
            where="--screen_lm_head",
            expected="a CPU target",
            got=error.what,
            hint="leave --screen_lm_head out, or build for CPUs and GPUs in two calls",
        ) from error


def _screenable(head: Draft, lowering: Lowering) -> WeightUse:
    """The weight of lm_head. Raises BuildError."""
    weight, extras = head.inputs[1] if len(head.inputs) > 1 else None, head.inputs[2:]
    use = lowering.use(weight) if isinstance(weight, str) and find_op(head.op).is_matmul else None
    if use is None:
        got = f"the logits come from {head.op}"
    elif use.dtype is not DType.W8:
        got = f"lm_head is {use.precision}"
    elif head.attrs["activations"] != "int8":
        got = f"lm_head takes {head.attrs['activations']} activations"
    elif extras != (None, None) or head.attrs["activation"] != "none" or head.attrs["gated"]:
        got = "lm_head has a bias, an activation function or a residual"
    else:
        return use
    raise BuildError(
        "--screen_lm_head does not fit the lm_head of this engine",
        where="--screen_lm_head",
        expected="w8 weights, int8 activations, and no bias or activation function",
        got=got,
        hint="give --precision w4g128 and --activations int8, or leave --screen_lm_head out",
    )


def _weights(head: WeightUse) -> tuple[WeightUse, WeightUse, WeightUse]:
    """Codes, dither and table."""
    name, k = head.name.rsplit(".", 1)[0], head.shape[1]
    codes = WeightUse(
        name=f"{name}.codes",
        tensor=head.tensor,
        dtype=DType.W4,
        shape=head.shape,
        panels=True,
        group=GROUP,
        made=half_codes,
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
