"""Matmuls of more than a few rows go to kernels that are faster, but give a row other bits than kernels of few rows do.

    matmul.w8.sm80 ▶ matmul.w8.sm90a        moe_down.bf16.sm80 ▶ moe_down.bf16.sm90a

A build with `--gemm_plugin disable` wants the same bits in any batch, and keeps the kernels that it has.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Program
from ingot.plugins.registry import find_op

NAME = "use_many_rows"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UseManyRows:
    """kernels: of matmuls → those that are faster for many rows; gated: the same of matmuls with a gate; wanted:
    whether bits may depend on the batch."""

    kernels: Mapping[str, str]
    gated: Mapping[str, str]
    wanted: bool

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """A matmul that keeps its kernel is refused with the reason."""
        steps, fired, refused = [], 0, Counter[str]()
        for step in program.steps:
            found = (self.gated if step.attrs.get("gated") else self.kernels).get(step.kernel)
            if find_op(step.op).packed is None:
                steps.append(step)
            elif found is not None and self.wanted:
                steps.append(dataclasses.replace(step, kernel=found))
                fired += 1
            else:
                steps.append(step)
                none = f"no kernel of many rows is faster than {step.kernel}"
                refused[none if found is None else "the build asks for the same bits in any batch"] += 1
        report = PassReport(name=NAME, fired=fired, refused=dict(refused))
        return dataclasses.replace(program, steps=tuple(steps)), report
