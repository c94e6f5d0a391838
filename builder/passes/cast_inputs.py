"""A kernel call of its own rounds what matmuls take in 16 bits, and what other ops read in float32: once for all.

    x ▶ matmul (rounds x), matmul (rounds x), add        x ▶ cast ▶ matmul, matmul        x ▶ add

`store_narrow` comes before: where nothing but matmuls reads a value, its own kernel stores it in 16 bits, if it can.
"""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.builder.passes.store_narrow import rounded_type
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.ops.cast import OP
from ingot.plugins.registry import find_op

NAME = "cast_inputs"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CastInputs:
    """kernel: that rounds."""

    kernel: str

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """fired: values that are rounded; a matmul that finds its input rounded already is counted as a refusal."""
        values, steps, refused = list(program.values), list[Draft](), 0
        made: dict[tuple[int, DType], int] = {}  # (value, type) → what holds it rounded
        for step in program.steps:
            x, dtype = next(iter(step.inputs), None), rounded_type(step)
            if not isinstance(x, int) or dtype is None or values[x].dtype is not DType.F32:
                steps.append(step)
                continue
            if (x, dtype) in made:
                refused += 1
            else:
                values.append(dataclasses.replace(values[x], dtype=dtype, tensor=""))
                made[x, dtype] = len(values) - 1
                name, to = f"{step.name}.{OP.name}", {"to": dtype.value}
                steps.append(
                    Draft(name=name, op=OP.name, kernel=self.kernel, inputs=(x,), outputs=(made[x, dtype],), attrs=to)
                )
            steps.append(_reading(step, made[x, dtype]))
        reasons = {"an earlier matmul reads it too": refused} if refused else {}
        report = PassReport(name=NAME, fired=len(made), refused=reasons)
        return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report


def _reading(step: Draft, rounded: int) -> Draft:
    """The step with its first input rounded. A step that also copies columns of it gets the unrounded one, too."""
    beside = find_op(step.op).unrounded(step.attrs)
    inputs = (rounded, *(step.inputs[0] if i == beside else ref for i, ref in enumerate(step.inputs) if i > 0))
    return dataclasses.replace(step, inputs=inputs)
