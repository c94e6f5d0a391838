"""Weights of bf16 are stored in 12 bits, without loss, where the target multiplies with them (plugins/compressed.py).

matmul.bf16.avx512bf16, weight bf16 ▶ matmul.bf16c.avx512bf16, weight bf16c
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ingot.builder.lower import Lowering
from ingot.builder.pack import WeightUse
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target

NAME = "compress_weights"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompressWeights:
    """kernels: of bf16 → of bf16c; fitting: which of some weights can be stored so."""

    lowering: Lowering
    kernels: Mapping[str, str]
    fitting: Callable[[Sequence[WeightUse]], set[str]]

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """A weight that another kernel call reads too, or that does not fit, stays bf16."""
        others = {
            name
            for step in program.steps
            for place, name in enumerate(step.inputs)
            if isinstance(name, str) and not (step.kernel in self.kernels and place == find_op(step.op).packed)
        }
        names = dict.fromkeys(self._weight(step) for step in program.steps if step.kernel in self.kernels)
        wanted = [self.lowering.use(name) for name in names if name not in others]
        wanted = [use for use in wanted if use.dtype is DType.BF16 and use.panels]
        fitting = self.fitting(wanted)
        stored = {use.name: self._compressed(use) for use in wanted if use.name in fitting}
        steps = [self._changed(step, stored) for step in program.steps]
        fired = sum(one is not other for one, other in zip(steps, program.steps, strict=True))
        unfit = len(wanted) - len(stored)
        refused = {"a weight has too many different exponents": unfit} if unfit else {}
        return dataclasses.replace(program, steps=tuple(steps)), PassReport(name=NAME, fired=fired, refused=refused)

    @staticmethod
    def _weight(step: Draft) -> str:
        place = find_op(step.op).packed
        assert place is not None, "kernels of bf16c multiply with a weight"
        name = step.inputs[place]
        assert isinstance(name, str), f"{step.name} multiplies with a weight"
        return name

    def _compressed(self, use: WeightUse) -> str:
        """The weight's new name."""
        self.lowering.drop_weights([use.name])
        return self.lowering.add_weight(dataclasses.replace(use, dtype=DType.BF16C))

    def _changed(self, step: Draft, stored: Mapping[str, str]) -> Draft:
        if step.kernel not in self.kernels or self._weight(step) not in stored:
            return step
        inputs = tuple(stored.get(ref, ref) if isinstance(ref, str) else ref for ref in step.inputs)
        return dataclasses.replace(step, kernel=self.kernels[step.kernel], inputs=inputs)


def compressing_kernels(target: Target) -> dict[str, str]:
    """Kernel of bf16 → kernel of the same instructions that takes bf16c. Nothing where the best kernel of bf16 has
    none."""
    kernels = target.kernels()
    found: dict[str, str] = {}
    for op in {name.split(".")[0] for name in kernels if name.split(".")[1] == DType.BF16C.value}:
        best = next((name for name in kernels if name.startswith(f"{op}.{DType.BF16.value}.")), "")
        packed = best.replace(f".{DType.BF16.value}.", f".{DType.BF16C.value}.", 1)
        if best and packed in kernels:
            found[best] = packed
    return found
