"""A kernel call of its own rounds the inputs of FP8 matmuls: once for all matmuls that read them with the same scales.

x ▶ matmul (rounds x), matmul (rounds x)        x ▶ round_to_fp8 ▶ codes, scales ▶ fp8_matmul, fp8_matmul

So it is for experts: moe_gate_up reads the same codes as matmuls of x; of what moe_down reads, each slot is rounded by
itself.
"""

import dataclasses
from collections.abc import Mapping

from ingot.builder.memory import Value
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.op import Op
from ingot.plugins.ops import (
    fp8_matmul,
    fp8_moe_down,
    fp8_moe_gate_up,
    matmul,
    moe_down,
    moe_gate_up,
    round_slots_to_fp8,
    round_to_fp8,
)

NAME = round_to_fp8.OP.name
_MADE: Mapping[str, tuple[Op, Op]] = {  # op that rounds its input → what rounds, what multiplies
    matmul.OP.name: (round_to_fp8.OP, fp8_matmul.OP),
    moe_gate_up.OP.name: (round_to_fp8.OP, fp8_moe_gate_up.OP),
    moe_down.OP.name: (round_slots_to_fp8.OP, fp8_moe_down.OP),
}
OPS = frozenset(op.name for made in _MADE.values() for op in made)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundToFp8:
    """kernels: by op, of those that the pass makes."""

    kernels: Mapping[str, str]

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """fired: values that are rounded; a matmul that finds its input rounded already is counted as a refusal."""
        values, steps, refused = list(program.values), list[Draft](), 0
        made: dict[tuple[object, ...], tuple[int, int]] = {}  # value, how it is rounded → its codes and scales
        for step in program.steps:
            if step.op not in _MADE or step.attrs["activations"] != "fp8":
                steps.append(step)
                continue
            rounding, product = _MADE[step.op]
            x, *others = step.inputs
            assert isinstance(x, int), "an activation"
            attrs: dict[str, Attr] = {"group": step.attrs["group"]}
            if "slots" in rounding.attrs:
                attrs["slots"] = _slots(step, values)
            rounded = x, rounding.name, *attrs.values()
            if rounded in made:
                refused += 1
            else:
                widths = rounding.out_cols([values[x].cols], attrs)
                for cols, dtype in zip(widths, (DType.F8, DType.F32), strict=True):
                    values.append(Value(rows=values[x].rows, cols=cols, dtype=dtype))
                made[rounded] = outputs = len(values) - 2, len(values) - 1
                name, kernel = f"{step.name}.{rounding.name}", self.kernels[rounding.name]
                steps.append(
                    Draft(name=name, op=rounding.name, kernel=kernel, inputs=(x,), outputs=outputs, attrs=attrs)
                )
            codes, scales = made[rounded]
            inputs: list[str | int | None] = [codes, *others]
            inputs.insert(product.inputs.index("scales"), scales)
            kernel = self.kernels[product.name]
            steps.append(dataclasses.replace(step, op=product.name, kernel=kernel, inputs=tuple(inputs)))
        reasons = {"an earlier matmul reads it too": refused} if refused else {}
        report = PassReport(name=NAME, fired=len(made), refused=reasons)
        return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report


def _slots(step: Draft, values: list[Value]) -> int:
    """How many a row of a step of experts takes."""
    ids = step.inputs[1]
    assert isinstance(ids, int), "an activation"
    return values[ids].cols
