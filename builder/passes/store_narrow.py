"""What only products read, which round it to 16 bits, is stored in 16 bits: nothing is converted in between.

    norm ▶ f32 ▶ product (rounds to bf16)        norm ▶ bf16 ▶ product

No result changes, since the products would round it all the same. It takes half the arena's bytes.
"""

import dataclasses
from collections import Counter

from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.registry import find_op

NAME = "store_narrow"
_NARROW = {"bf16": DType.BF16, "f16": DType.F16}  # what a product says that it rounds to → the type


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreNarrow:
    """ops: whose kernels store their first output in 16 bits where they should."""

    ops: frozenset[str]

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """Values that a product reads, and that stay float32, are refused with the reason."""
        values, fired, refused = list(program.values), 0, Counter[str]()
        for step in program.steps:
            for place, index in enumerate(step.outputs):
                readers = [] if index is None else [each for each in program.steps if index in each.inputs]
                found = _common_type(readers, index)
                if index is None or found is None:
                    continue
                if isinstance(found, str):
                    refused[found] += 1
                elif place > 0 or step.op not in self.ops:
                    refused[f"{step.op} stores float32"] += 1
                else:
                    values[index] = dataclasses.replace(values[index], dtype=found)
                    fired += 1
        report = PassReport(name=NAME, fired=fired, refused=dict(refused))
        return dataclasses.replace(program, values=tuple(values)), report


def _common_type(readers: list[Draft], index: int | None) -> DType | str | None:
    """The type to which all readers round a value; why there is none; None where no product rounds it."""
    rounding = [_rounds_to(step, index) for step in readers]
    found = set(rounding) - {None}
    if not found:
        return None
    if None in rounding:
        return "others than products read it too"
    return found.pop() if len(found) == 1 else "products round it to several types"


def _rounds_to(step: Draft, index: int | None) -> DType | None:
    if step.inputs[0] != index or step.inputs.count(index) > 1 or find_op(step.op).unrounded(step.attrs) is not None:
        return None
    return rounded_type(step)


def rounded_type(step: Draft) -> DType | None:
    """The 16-bit type to which a product rounds its first input."""
    return None if find_op(step.op).packed is None else _NARROW.get(str(step.attrs["activations"]))
