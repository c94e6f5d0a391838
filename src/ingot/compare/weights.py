"""Packed weights against the source's: is every value what the precision makes of it?

f32, bf16   the source's value, rounded to nearest: nothing else
w8, w4      the integer nearest to the source's value under the scales that are packed with it; where a search has made
            the scale smaller than the largest value needs, that value has the outermost integer on its side
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.builder.source import Source
from ingot.compare.packed import Block, PackedWeights
from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import Plan, Step
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows

OUTERMOST = {DType.W8: (-127, 127), DType.W4: (-8, 7)}  # integers of a row
HALF = 0.5 * (1 + 2.0**-10)  # of a step, the float32 rounding of the quotient included
CLIPPED = 4.0  # a value this many times the outermost one was not clipped by a search: the scale is wrong


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrongValue:
    """The value of a weight that is farthest beyond what its precision allows."""

    row: int
    col: int
    got: float
    expected: float
    bound: float

    @property
    def excess(self) -> float:
        """How far it is beyond; infinite where a number is none."""
        excess = abs(self.got - self.expected) - self.bound
        return excess if np.isfinite(excess) else np.inf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightError:
    """relative: root of the squared differences over that of the squared values; wrong_values, wrong_rows: how many."""

    relative: float
    worst: WrongValue | None
    wrong_values: int
    wrong_rows: int


def weight_error(name: str, packed: PackedWeights, source: Source) -> WeightError:
    """Compare every value of a weight; memory stays at a few blocks."""
    dtype = packed.weights[name].dtype
    squares = difference = 0.0
    worst: WrongValue | None = None
    wrong_values = wrong_rows = 0
    for block in packed.blocks(name):
        wanted = _source_rows(name, block, source)
        got = values_of(block.rows).reshape(wanted.shape)
        expected, bound = _expected(wanted, block.rows, dtype)
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(got - expected) <= bound) | (got == expected) | (np.isnan(got) & np.isnan(expected)))
            squares += float(np.square(wanted, dtype=np.float64).sum())
            difference += float(np.square(got - wanted, dtype=np.float64).sum())
        if wrong.any():
            wrong_values += int(wrong.sum())
            wrong_rows += int(wrong.any(axis=1).sum())
            found = _worst(block, got, expected, bound, wrong)
            worst = found if worst is None or found.excess > worst.excess else worst
    relative = float(np.sqrt(difference / squares)) if squares else 0.0
    return WeightError(relative=relative, worst=worst, wrong_values=wrong_values, wrong_rows=wrong_rows)


def _source_rows(name: str, block: Block, source: Source) -> Array:
    """The same rows of the Checkpoint."""
    runs = np.split(block.numbers, np.flatnonzero(np.diff(block.numbers) != 1) + 1)
    return np.concatenate([source.rows(name, int(run[0]), int(run[-1]) + 1) for run in runs])


def values_of(rows: Array | QuantisedRows) -> Array:
    """What rows stand for, float32."""
    return rows.values if isinstance(rows, QuantisedRows) else rows


def _expected(wanted: Array, rows: Array | QuantisedRows, dtype: DType) -> tuple[Array, Array]:
    """What a stored weight must be, and how far from it it may be."""
    if not isinstance(rows, QuantisedRows):
        with np.errstate(over="ignore"):
            return to_float32(from_float32(wanted, dtype), dtype), np.zeros_like(wanted)
    if not (finite := np.isfinite(wanted)).all():  # a row that holds what is no number becomes NaN as a whole
        wanted = np.where(finite.all(axis=1, keepdims=True), wanted, np.float32(np.nan))
    lowest, highest = OUTERMOST[dtype]
    unit = rows.scale[:, None]
    if rows.multipliers is not None:
        unit = np.repeat(unit * rows.multipliers, rows.group, axis=1)[:, : wanted.shape[1]]
    ends = lowest * unit, highest * unit  # a scale or multiplier may be negative
    nearest = np.clip(wanted, np.minimum(*ends), np.maximum(*ends))
    beyond = np.abs(wanted) > CLIPPED * np.abs(nearest)
    return np.where(beyond, wanted, nearest), np.broadcast_to(HALF * np.abs(unit), wanted.shape)


def _worst(block: Block, got: Array, expected: Array, bound: Array, wrong: npt.NDArray[np.bool_]) -> WrongValue:
    with np.errstate(invalid="ignore"):
        excess = np.nan_to_num(np.abs(got - expected) - bound, nan=np.inf)
    row, col = np.unravel_index(np.argmax(np.where(wrong, excess, -1.0)), wrong.shape)
    return WrongValue(
        row=int(block.numbers[row]), col=int(col), got=float(got[row, col]), expected=float(expected[row, col]),
        bound=float(bound[row, col]),
    )  # fmt: skip


def place(plan: Plan, step: Step, weight: str, row: int, col: int) -> str:
    """Where in a weight a value lies, in the words of the model: tokens, heads, gate or up."""
    shape = next(each.shape for each in plan.weights if each.name == weight)
    column = f"column {col}"
    if len(shape) == 3:
        return f"expert {row // shape[1]}, row {row % shape[1]}, {column}"
    if len(shape) == 1:
        return f"element {row}"
    if step.op == "embedding":
        return f"{'token' if weight == step.inputs[0] else 'position'} {row}, {column}"
    if step.outputs[0] == plan.logits:
        return f"token {row}, {column}"
    index = plan.steps.index(step)
    reader, writer = _reader(plan, index, step.outputs[0]), _writer(plan, index, step.inputs[0])
    if writer is not None and writer.op == "paged_attention":
        column += f" (head {col // int(writer.attrs['head_dim'])})"
    if reader is not None and reader.op == "rope_kv_write":
        return f"row {row} ({_head(reader, row)}), {column}"
    if step.attrs.get("gated"):
        half = shape[0] // 2
        return f"{'gate' if row < half else 'up'} row {row % half}, {column}"
    return f"row {row}, {column}"


def _head(step: Step, row: int) -> str:
    heads, kv_heads, dim = (int(step.attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    head = row // dim
    if head < heads:
        return f"query head {head}"
    return f"key head {head - heads}" if head < heads + kv_heads else f"value head {head - heads - kv_heads}"


def _reader(plan: Plan, index: int, buffer: str) -> Step | None:
    """The next step that reads what step `index` wrote into a buffer."""
    return next((each for each in plan.steps[index + 1 :] if buffer in each.inputs), None)


def _writer(plan: Plan, index: int, buffer: str) -> Step | None:
    """The step that computed what step `index` finds in a buffer; gathering rows computes nothing."""
    for number in range(index - 1, -1, -1):
        step = plan.steps[number]
        if buffer in step.outputs:
            return _writer(plan, number, step.inputs[0]) if step.op == "gather_rows" else step
    return None
