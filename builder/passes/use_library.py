"""Matmuls of more than a few rows are left to a library, where the target's sessions can call one.

    matmul.bf16.sm80 ▶ matmul.bf16.sm80.cublaslt

The kernel's name says so, and a machine without the library refuses the engine.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Program
from ingot.plugins.registry import find_op

NAME = "use_library"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UseLibrary:
    """kernels: of matmuls → those that leave the library all but a few rows; wanted: whether the build asks for it."""

    kernels: Mapping[str, str]
    wanted: bool

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """A matmul that stays with the target's own kernel is refused with the reason."""
        steps, fired, refused = [], 0, Counter[str]()
        for step in program.steps:
            if find_op(step.op).packed is None:
                steps.append(step)
            elif self.wanted and step.kernel in self.kernels:
                steps.append(dataclasses.replace(step, kernel=self.kernels[step.kernel]))
                fired += 1
            else:
                steps.append(step)
                known = step.kernel in self.kernels
                refused["the build asks for own kernels" if known else f"the library has no {step.kernel}"] += 1
        report = PassReport(name=NAME, fired=fired, refused=dict(refused))
        return dataclasses.replace(program, steps=tuple(steps)), report
