"""What a code may stand for, and the scales of groups of columns under which a row loses least.

    W[n, k] = (level[code[n, k]] - zero[n, j]) * scale[n, j]        j = k // group

The loss of a column counts as often as its input is loud: the squares of inputs, summed over a calibration text, weigh
the squared errors (the importance matrix of llama.cpp). Scales have 11 bits, so that engines, which keep float16, take
them as they are.
"""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from ingot.builder.parallel_map import cores, parallel_map
from ingot.dtypes import DType, from_float32, round_to_f8, to_float32

Float32 = npt.NDArray[np.float32]

_CUTS = np.linspace(0.7, 1.06, 13, dtype=np.float32)  # of the step that holds a group's extreme
_CHUNK = 1 << 20  # numbers worked on at a time by a thread: fewer take turns too often
_SCALE_BITS = 11  # of float16's significand
# Denser where weights are: the levels of GGUF's IQ4_NL.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """table: levels in ascending order; nothing where codes are levels. zeros: whether groups have zero points.
    floats: levels are FP8 numbers (E4M3FN), and codes their bits."""

    lowest: int
    highest: int
    table: tuple[int, ...] = ()
    zeros: bool = False
    floats: bool = False

    def nearest(self, ratios: Float32, zero: Float32 | None) -> Float32:
        """In the place of numbers in units of the scale, the levels, less the zero point, that are nearest to them."""
        if self.table:
            ratios *= 2
            np.ceil(ratios, out=ratios)
            ratios -= 2 * self.table[0]
            np.minimum(ratios, np.float32(len(self._by_halves)), out=ratios)
            np.maximum(ratios, np.float32(-1), out=ratios)
            return np.take(self._by_halves, ratios.astype(np.intp), out=ratios, mode="clip")
        if self.floats:
            ratios[:] = round_to_f8(ratios)
            return ratios
        np.rint(ratios, out=ratios)
        if zero is not None:
            ratios += zero
        np.maximum(ratios, np.float32(self.lowest), out=ratios)
        np.minimum(ratios, np.float32(self.highest), out=ratios)
        if zero is not None:
            ratios -= zero
        return ratios

    @functools.cached_property
    def _by_halves(self) -> Float32:
        """The level nearest to the lowest one plus i / 2 and to all below it down to i - 1, since levels are whole and
        what is as near to two of them becomes the lower one."""
        table = np.array(self.table, np.float32)
        halves = np.arange(2 * self.table[0], 2 * self.table[-1] + 1) / 2
        found: Float32 = table[np.searchsorted((table[1:] + table[:-1]) / 2, halves)]
        return found

    def codes(self, levels: Float32, zero: Float32 | None) -> npt.NDArray[np.int8]:
        """What is stored for levels less their zero points."""
        if self.table:
            return np.searchsorted(np.array(self.table, np.float32), levels).astype(np.int8)
        if self.floats:
            return from_float32(levels, DType.F8).view(np.int8)
        return (levels if zero is None else levels + zero).astype(np.int8)

    @property
    def kind(self) -> str:
        """For people."""
        if self.floats:
            return "f8"
        return "table4" if self.table else ("u4" if self.zeros else "i4") if self.highest < 16 else "i8"

    def values(self, codes: npt.NDArray[np.int8]) -> Float32:
        """The levels of stored codes; zero points are not taken away."""
        if self.floats:
            return to_float32(codes.view(np.uint8), DType.F8)
        return np.array(self.table, np.float32)[codes] if self.table else codes.astype(np.float32)

    @property
    def ends(self) -> tuple[int, int]:
        return (self.table[0], self.table[-1]) if self.table else (self.lowest, self.highest)


EVEN = Levels(lowest=-8, highest=7)
SHIFTED = Levels(lowest=0, highest=15, zeros=True)
UNEVEN = Levels(lowest=0, highest=15, table=_UNEVEN)
BYTES = Levels(lowest=-127, highest=127)
E4M3 = Levels(lowest=-448, highest=448, floats=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """scale, zero: float32 [rows, groups]; zero: None where levels have none."""

    scale: Float32
    zero: Float32 | None


def search_scales(weight_rows: Float32, squares: Float32, group: int, levels: Levels) -> Scales:
    """The scales of rows [n, K]. squares: of the inputs of each column, [K]; the last group may be shorter."""
    n, k = weight_rows.shape
    groups = -(-k // group)
    weights = np.zeros(groups * group, np.float32)
    mean = float(squares.mean())
    weights[:k] = squares / mean if mean > 0 else 1
    weights[:k] += np.float32(1e-4)  # a column that was never loud still counts a little
    heavy = weights.reshape(groups, group)

    def search(begin: int) -> tuple[Float32, Float32]:
        part = weight_rows[begin : begin + size]
        padded = np.zeros((len(part), groups * group), np.float32)
        padded[:, :k] = part
        return (_shifted if levels.zeros else _centred)(padded.reshape(-1, groups, group), heavy, levels)

    size = max(1, _CHUNK // k)
    found = list(parallel_map(search, range(0, n, size), cores()))
    scale, zero = (np.concatenate(each) for each in zip(*found, strict=True))
    return Scales(scale=scale, zero=zero if levels.zeros else None)


def largest_scales(weight_rows: Float32, group: int, levels: Levels) -> Scales:
    """Scales under which the largest weight of each group has the last code: rounding without any search."""
    n, k = weight_rows.shape
    padded = np.zeros((n, -(-k // group) * group), np.float32)
    padded[:, :k] = weight_rows
    values = padded.reshape(n, -1, group)
    high, low = np.maximum(values.max(axis=2), 0), np.minimum(values.min(axis=2), 0)
    if not levels.zeros:
        return Scales(scale=round_scale(np.maximum(high, -low) / np.float32(levels.ends[1])), zero=None)
    scale = round_scale((high - low) / np.float32(levels.highest))
    return Scales(scale=scale, zero=np.clip(np.rint(-low * _inverse(scale)), levels.lowest, levels.highest))


def round_scale(scale: Float32) -> Float32:
    """To the bits that engines keep."""
    significand, exponent = np.frexp(scale)
    rounded = np.rint(np.ldexp(significand, _SCALE_BITS))
    found: Float32 = np.ldexp(rounded, exponent - _SCALE_BITS).astype(np.float32)
    return found


def _centred(values: Float32, weights: Float32, levels: Levels) -> tuple[Float32, Float32]:
    """(scale, nothing): steps of both signs, since the levels reach further on one side."""
    high, low = values.max(axis=2), values.min(axis=2)
    extreme = np.where(high > -low, high, low)
    best, least = np.zeros_like(extreme), np.full(extreme.shape, np.inf, np.float32)
    heavy, found = values * weights, np.empty_like(values)
    for end in levels.ends if -levels.ends[0] != levels.ends[1] else levels.ends[1:]:
        for cut in _CUTS:
            step = round_scale(extreme * (cut / np.float32(end)))
            _nearest(values, step, None, levels, found)
            fitted = _fitted(found, weights, heavy, step)
            error = _errors(values, weights, step, found)
            best, least = np.where(error < least, step, best), np.minimum(error, least)
            error = _errors(values, weights, fitted, _nearest(values, fitted, None, levels, found))
            best, least = np.where(error < least, fitted, best), np.minimum(error, least)
    return best, np.zeros_like(best)


def _shifted(values: Float32, weights: Float32, levels: Levels) -> tuple[Float32, Float32]:
    """(scale, zero point)"""
    high, low = np.maximum(values.max(axis=2), 0), np.minimum(values.min(axis=2), 0)
    best, zero, found = np.zeros_like(high), np.zeros_like(high), np.empty_like(values)
    least = np.full(high.shape, np.inf, np.float32)
    for cut in _CUTS:
        step = round_scale((high - low) * (cut / np.float32(levels.highest)))
        ratio = -(low + high) / 2 * _inverse(step) + np.float32(levels.highest / 2)
        for shift in (np.floor(ratio), np.ceil(ratio)):
            shift = np.clip(shift, levels.lowest, levels.highest)
            error = _errors(values, weights, step, _nearest(values, step, shift, levels, found))
            better = error < least
            best, zero, least = np.where(better, step, best), np.where(better, shift, zero), np.minimum(error, least)
    return best, zero


def _nearest(values: Float32, step: Float32, zero: Float32 | None, levels: Levels, found: Float32) -> Float32:
    """The levels of values under a step, in `found`."""
    np.multiply(values, _inverse(step)[..., None], out=found)
    return levels.nearest(found, None if zero is None else zero[..., None])


def _errors(values: Float32, weights: Float32, step: Float32, found: Float32) -> Float32:
    """What values lose as levels `found`, which are overwritten."""
    found *= step[..., None]
    found -= values
    found *= found
    error: Float32 = np.einsum("ngk,gk->ng", found, weights)
    return error


def _fitted(found: Float32, weights: Float32, heavy: Float32, step: Float32) -> Float32:
    """The scale that fits best while levels stay. heavy: values times weights."""
    along = np.einsum("ngk,ngk->ng", found, heavy)
    squares = np.einsum("ngk,gk->ng", found * found, weights)
    fitted: Float32 = np.where(squares > 0, round_scale(along / np.where(squares > 0, squares, 1)), step)
    return fitted


def _inverse(step: Float32) -> Float32:
    """1 / step, 0 for a group of zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / step
    found: Float32 = np.where(np.isfinite(inverse), inverse, np.float32(0))
    return found
