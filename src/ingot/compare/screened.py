"""The weights of a screen against those of the product whose place it takes: does it know the same rows?"""

import dataclasses

import numpy as np

from ingot.builder.parallel_map import parallel_map
from ingot.compare.packed import Block, PackedWeights
from ingot.plan import Plan
from ingot.plugins.ops.screen import dither, half_codes
from ingot.plugins.quantised import QuantisedRows


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrongRow:
    """The first row of a screen's weight that is not made of the product's row of the same number."""

    weight: str
    row: int


def wrong_screen_row(plan: Plan, packed: PackedWeights, threads: int) -> WrongRow | None:
    """None where every row is right, or where the plan has no screen."""
    if not plan.screen:
        return None
    _, _, codes, spread, table = plan.screen[1].inputs
    wrong = np.flatnonzero(packed.whole(spread) != dither(packed.weights[spread].shape[0]))
    if len(wrong):
        return WrongRow(weight=spread, row=int(wrong[0]))

    def check(block: Block) -> WrongRow | None:
        rows = packed.read(block)
        assert isinstance(rows, QuantisedRows), "a screen takes the place of a product of w8"
        for name, expected in ((codes, half_codes(rows)), (table, rows)):
            found = packed.read(dataclasses.replace(block, weight=packed.weights[name]))
            assert isinstance(found, QuantisedRows), f"{name} is quantised"
            wrong = np.flatnonzero(_differ(found, expected))
            if len(wrong):
                return WrongRow(weight=name, row=int(block.numbers[wrong[0]]))
        return None

    full = packed.blocks(plan.steps[-1].inputs[1])
    return next((found for found in parallel_map(check, full, threads) if found is not None), None)


def _differ(one: QuantisedRows, other: QuantisedRows) -> np.typing.NDArray[np.bool_]:
    """bool [rows]: the scale or an integer of the row; a scale that is no number is one in both."""
    scales = (one.scale != other.scale) & ~(np.isnan(one.scale) & np.isnan(other.scale))
    different: np.typing.NDArray[np.bool_] = scales | (one.integers != other.integers).any(axis=1)
    return different
