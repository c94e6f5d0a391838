"""Kernels that multiply all rows of an expert together need the rows sorted by expert: one kernel call sorts them.

moe_route ▶ ids ▶ moe_gate_up, moe_down        moe_route ▶ ids ▶ sort_by_expert ▶ lists ▶ moe_gate_up, moe_down
"""

import dataclasses
from collections.abc import Callable

from ingot.builder.memory import Value
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plugins.ops.sort_by_expert import COLUMNS, OP
from ingot.plugins.registry import find_op

NAME = OP.name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SortByExpert:
    """kernel: that sorts; experts: name of a weight → for how many experts it has a matrix."""

    kernel: str
    experts: Callable[[str], int]

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """fired: rows that are sorted; a matmul whose rows are sorted already is counted as a refusal."""
        values, steps, again = list(program.values), list[Draft](), 0
        made: dict[tuple[int, int], int] = {}  # (ids, number of experts) → the lists
        for step in program.steps:
            op = find_op(step.op)
            if op.listed is None or op.packed is None:
                steps.append(step)
                continue
            ids, weight = step.inputs[1], step.inputs[op.packed]
            assert isinstance(ids, int), "an activation"
            assert isinstance(weight, str), "a weight"
            experts = self.experts(weight)
            if (ids, experts) in made:
                again += 1
            else:
                cols = COLUMNS * values[ids].cols
                values.append(Value(rows=values[ids].rows, cols=cols, dtype=DType.I32))
                made[ids, experts] = lists = len(values) - 1
                name, attrs = f"{step.name}.{OP.name}", {"experts": experts}
                steps.append(
                    Draft(name=name, op=OP.name, kernel=self.kernel, inputs=(ids,), outputs=(lists,), attrs=attrs)
                )
            lists = made[ids, experts]
            inputs = tuple(lists if index == op.listed else ref for index, ref in enumerate(step.inputs))
            steps.append(dataclasses.replace(step, inputs=inputs))
        refused = {"an earlier matmul reads them too": again} if again else {}
        report = PassReport(name=NAME, fired=len(made), refused=refused)
        return dataclasses.replace(program, steps=tuple(steps), values=tuple(values)), report
