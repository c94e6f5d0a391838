"""Weights of an engine that no tensor of the source stands behind: what ops derive from the weight of a product."""

import dataclasses

import numpy as np

from ingot.builder.parallel_map import parallel_map
from ingot.compare.packed import Block, PackedWeights
from ingot.plan import Step
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.registry import find_op


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrongRow:
    """The first row of a weight, or number of a vector, that is not what its op makes of the row of the same number."""

    weight: str
    row: int


def wrong_row(step: Step, packed: PackedWeights, threads: int) -> WrongRow | None:
    """None where every row is right, or where the step reads no such weight."""
    op = find_op(step.op)
    for index, numbers in op.constants.items():
        name = step.inputs[index]
        wrong = np.flatnonzero(packed.whole(name) != numbers(packed.weights[name].shape[0]))
        if len(wrong):
            return WrongRow(weight=name, row=int(wrong[0]))
    if op.packed is None or not op.derived:
        return None

    def check(block: Block) -> WrongRow | None:
        rows = packed.read(block)
        assert isinstance(rows, QuantisedRows), "weights are derived from quantised ones"
        for index, make in op.derived.items():
            name = step.inputs[index]
            found = packed.read(dataclasses.replace(block, weight=packed.weights[name]))
            assert isinstance(found, QuantisedRows), f"{name} is quantised"
            wrong = np.flatnonzero(_differ(found, make(rows)))
            if len(wrong):
                return WrongRow(weight=name, row=int(block.numbers[wrong[0]]))
        return None

    blocks = packed.blocks(step.inputs[op.packed])
    return next((found for found in parallel_map(check, blocks, threads) if found is not None), None)


def _differ(one: QuantisedRows, other: QuantisedRows) -> np.typing.NDArray[np.bool_]:
    """bool [rows]: the scale or an integer of the row; a scale that is not a number is one in both."""
    scales = (one.scale != other.scale) & ~(np.isnan(one.scale) & np.isnan(other.scale))
    different: np.typing.NDArray[np.bool_] = scales | (one.integers != other.integers).any(axis=1)
    return different
