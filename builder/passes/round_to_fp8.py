"""A kernel call of its own rounds the inputs of FP8 matmuls: once for all matmuls that read them with the same scales.

x ▶ matmul (rounds x), matmul (rounds x)        x ▶ round_to_fp8 ▶ codes, scales ▶ fp8_matmul, fp8_matmul
"""

import dataclasses

from ingot.builder.memory import Value
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.ops.fp8_matmul import OP as PRODUCT
from ingot.plugins.ops.matmul import OP as MATMUL
from ingot.plugins.ops.round_to_fp8 import OP, out_cols

NAME = OP.name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundToFp8:
    """kernel: that rounds; product: that multiplies what is rounded."""

    kernel: str
    product: str

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """fired: values that are rounded; a matmul that finds its input rounded already is counted as a refusal."""
        values, steps, refused = list(program.values), list[Draft](), 0
        made: dict[tuple[int, int], tuple[int, int]] = {}  # (value, group) → its codes and scales
        for step in program.steps:
            if step.op != MATMUL.name or step.attrs["activations"] != "fp8":
                steps.append(step)
                continue
            (x, *others), group = step.inputs, int(step.attrs["group"])
            assert isinstance(x, int), "an activation"
            if (x, group) in made:
                refused += 1
            else:
                attrs = {"group": group}
                widths = out_cols([values[x].cols], attrs)
                for cols, dtype in zip(widths, (DType.F8, DType.F32), strict=True):
                    values.append(Value(rows=values[x].rows, cols=cols, dtype=dtype))
                made[x, group] = outputs = len(values) - 2, len(values) - 1
                name = f"{step.name}.{OP.name}"
                steps.append(
                    Draft(name=name, op=OP.name, kernel=self.kernel, inputs=(x,), outputs=outputs, attrs=attrs)
                )
            inputs = (*made[x, group], *others)
            steps.append(dataclasses.replace(step, op=PRODUCT.name, kernel=self.product, inputs=inputs))
        reasons = {"an earlier matmul reads it too": refused} if refused else {}
        report = PassReport(name=NAME, fired=len(made), refused=reasons)
        return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report
