"""Packed weights against the source's: is every value what the precision makes of it?

floats      the source's value, rounded to nearest: nothing else
w8, w4      the integer nearest to the source's value under the scales that are packed with it; where a search has made
            the scale smaller than the largest value needs, that value has the outermost integer on its side
..t, ..ts   the source's code: no value is farther off than half of what the group's scale is worth
f8          the source's value, of which two products of scales may differ by their rounding
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.builder.parallel_map import parallel_map
from ingot.builder.source import Source
from ingot.compare.packed import Block, PackedWeights
from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import Plan, Step
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.registry import find_op
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.plugins.weight_values import factors

HALF = 0.5 * (1 + 2.0**-10)  # of a step, the float32 rounding of the quotient included
Places = tuple[npt.NDArray[np.intp], ...]  # rows and columns of a block

OFFSET = np.float32(2.0**-11 * (1 + 2.0**-10))  # relative, of a number that becomes a float16
ROUNDED = np.float32(2.0**-22)  # relative, of a product of two scales
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BlockError:
    """squares, difference: sums of the squared values and of the squared differences."""

    squares: float
    difference: float
    worst: WrongValue | None
    wrong_values: int
    wrong_rows: int


def weight_error(name: str, packed: PackedWeights, source: Source, threads: int) -> WeightError:
    """Compare every value of a weight; memory stays at a few blocks for each thread."""
    found = list(parallel_map(lambda block: _block_error(name, block, packed, source), packed.blocks(name), threads))
    squares, difference = sum(each.squares for each in found), sum(each.difference for each in found)
    wrong = [each.worst for each in found if each.worst is not None]
    return WeightError(
        relative=float(np.sqrt(difference / squares)) if squares else 0.0,
        worst=max(wrong, key=lambda value: value.excess, default=None),
        wrong_values=sum(each.wrong_values for each in found),
        wrong_rows=sum(each.wrong_rows for each in found),
    )


def factor_error(name: str, packed: PackedWeights, dtype: DType, threads: int) -> float:
    """How far rounding to the type of matrix units moves what rows of groups stand for: root of the squared differences
    over that of the squared values."""

    def sums(block: Block) -> tuple[float, float]:
        rows = packed.read(block)
        if not isinstance(rows, (GroupedRows, UnitRows, F8Rows)):
            return 0.0, 0.0
        scale, exact = rows.scale[:, None], rows.unscaled
        moved = (factors(rows, dtype) - exact) * scale
        squares = (np.square(each[np.isfinite(each)], dtype=np.float64).sum() for each in (exact * scale, moved))
        size, difference = squares
        return float(size), float(difference)

    found = list(parallel_map(sums, packed.blocks(name), threads))
    size = sum(each for each, _ in found)
    return float(np.sqrt(sum(each for _, each in found) / size)) if size else 0.0


def _block_error(name: str, block: Block, packed: PackedWeights, source: Source) -> _BlockError:
    wanted, rows = _source_rows(name, block, source), packed.read(block)
    got = values_of(rows).reshape(wanted.shape)
    numbers = np.isfinite(wanted) & np.isfinite(got)
    both = np.where(numbers, wanted, 0), np.where(numbers, got - wanted, 0)
    squares, difference = (float(np.square(each, dtype=np.float64).sum()) for each in both)
    if isinstance(rows, (F8Rows, UnitRows)):
        at = np.nonzero(~(np.abs(got - wanted) <= ROUNDED * np.abs(wanted)) & ~(np.isnan(got) & np.isnan(wanted)))
        expected, bound = wanted[at], ROUNDED * np.abs(wanted[at])
    elif isinstance(rows, WeightRows):
        at, expected, bound = _not_the_nearest(wanted, got, rows)
    else:
        at, expected, bound = _not_the_rounded(wanted, got, block.weight.dtype.numbers)
    return _BlockError(
        squares=squares,
        difference=difference,
        wrong_values=len(at[0]),
        wrong_rows=len(np.unique(at[0])),
        worst=_worst(block, at, got[at], expected, bound) if len(at[0]) else None,
    )


def _source_rows(name: str, block: Block, source: Source) -> Array:
    """The same rows of the Checkpoint."""
    runs = np.split(block.numbers, np.flatnonzero(np.diff(block.numbers) != 1) + 1)
    return np.concatenate([source.rows(name, int(run[0]), int(run[-1]) + 1) for run in runs])


def values_of(rows: Array | WeightRows) -> Array:
    """What rows stand for, float32."""
    return rows.values if isinstance(rows, WeightRows) else rows


def _not_the_rounded(wanted: Array, got: Array, dtype: DType) -> tuple[Places, Array, Array]:
    """Where a float weight is not the source's value rounded; what it must be there, how far from it it may be."""
    expected = to_float32(from_float32(wanted, dtype), dtype)
    at = np.nonzero((got != expected) & ~(np.isnan(got) & np.isnan(expected)))
    return at, expected[at], np.zeros(len(at[0]), np.float32)


def _not_the_nearest(wanted: Array, got: Array, rows: QuantisedRows | GroupedRows) -> tuple[Places, Array, Array]:
    """The same of a quantised weight. Most values lie within half a step: the others were clipped, or are wrong."""
    unit = rows.scale[:, None]
    steps = rows.group_scale if isinstance(rows, GroupedRows) else rows.multipliers
    if steps is not None:
        unit = np.repeat(unit * steps, rows.group, axis=1)[:, : wanted.shape[1]]
    bounds: Array = np.float32(HALF) * np.abs(unit)
    if isinstance(rows, GroupedRows) and rows.shift is not None:  # an offset is rounded by itself, a scale may be zero
        offsets: Array = np.where(rows.is_offset, np.abs(rows.scale), np.float32(0))[:, None] * np.abs(rows.shift)
        bounds = bounds + OFFSET * np.repeat(offsets, rows.group, axis=1)[:, : wanted.shape[1]]
    at = np.nonzero(~(np.abs(got - wanted) <= bounds))
    # a row that holds what is no number becomes NaN as a whole
    finite = np.isfinite(wanted).all(axis=1, keepdims=True)
    value: Array = np.where(finite, wanted, np.float32(np.nan))[at]
    unit, found = np.broadcast_to(unit, wanted.shape)[at], got[at]
    expected: Array = value
    if not isinstance(rows, GroupedRows):  # whose codes nobody has searched
        lowest, highest = rows.format.codes
        ends = lowest * unit, highest * unit  # a scale or multiplier may be negative
        nearest = np.clip(value, np.minimum(*ends), np.maximum(*ends))
        expected = np.where(np.abs(value) <= CLIPPED * np.abs(nearest), nearest, value)  # value of a scale that is NaN
    bound: Array = np.broadcast_to(bounds, wanted.shape)[at]
    right = (np.abs(found - expected) <= bound) | (found == expected) | (np.isnan(found) & np.isnan(expected))
    wrong = np.flatnonzero(~right)
    return (at[0][wrong], at[1][wrong]), expected[wrong], bound[wrong]


def _worst(block: Block, at: Places, got: Array, expected: Array, bound: Array) -> WrongValue:
    index = int(np.argmax(np.nan_to_num(np.abs(got - expected) - bound, nan=np.inf)))
    return WrongValue(
        row=int(block.numbers[at[0][index]]),
        col=int(at[1][index]),
        got=float(got[index]),
        expected=float(expected[index]),
        bound=float(bound[index]),
    )


def place(plan: Plan, step: Step, weight: str, row: int, col: int) -> str:
    """Where in a weight a value lies, in the words of the model: tokens, heads, gate or up."""
    shape = next(each.shape for each in plan.weights if each.name == weight)
    column = f"column {col}"
    if len(shape) == 3:
        stack = "head" if find_op(step.op).stacked else "expert"
        return f"{stack} {row // shape[1]}, row {row % shape[1]}, {column}"
    if len(shape) == 1:
        return f"element {row}"
    op, role = find_op(step.op), step.inputs.index(weight)
    if role in op.tables:
        rows = op.inputs[role].rstrip("?").removesuffix("table").rstrip("_") or "token"
        return f"{rows} {row}, {column}"
    if step.outputs[0] == plan.logits:
        return f"token {row}, {column}"
    index = plan.steps.index(step)
    reader, writer = _reader(plan, index, step.outputs[0]), _writer(plan, index, step.inputs[0])
    if writer is not None and find_op(writer.op).reads_kv:
        column += f" (head {col // int(writer.attrs['head_dim'])})"
    if reader is not None and find_op(reader.op).writes_kv and not find_op(reader.op).latent:
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
            return _writer(plan, number, step.inputs[0]) if find_op(step.op).copies_rows else step
    return None
