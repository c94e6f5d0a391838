"""Names the kernel that draws tokens from the logits, as every kernel call names its own.

    cpu/avx512bf16    sample.f32.avx512

A session adds no choice of its own. A pipeline stage without logits draws nothing.
"""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Program
from ingot.errors import BuildError
from ingot.plugins.ops.sample import OP
from ingot.plugins.target import Target

NAME = "choose_draw_kernel"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChooseDrawKernel:
    """The best one of the target."""

    target: Target

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """Raises BuildError where the target has none."""
        found = next((name for name in self.target.kernels() if name.startswith(f"{OP.name}.f32.")), None)
        if found is None:
            raise BuildError(
                f"{self.target.name} has no kernel that draws tokens",
                expected=f"{OP.name}.f32.<isa or sm>",
                hint="add it to the target's kernels()",
            )
        return dataclasses.replace(program, draw_kernel=found), PassReport(name=NAME, fired=1)
