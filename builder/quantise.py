"""float32 rows → quantised rows, each by itself: the same row gives the same integers whatever lies beside it.

Scales are searched, not read off the largest magnitude: what counts is the squared error of the whole row.

    w8     a scale per row, a little below or at top / 127, then least squares
    w4gG   1. for each group alone the best real step, of both signs: codes reach from -8 to 7, so that the sign of a
              step says which end of the group is cut
           2. for several row scales the whole multiples next to those steps; the best scale of each row stays
           3. least squares of the scale under the codes found, and the multipliers around the present ones
"""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import Precision
from ingot.plugins.quantised import QuantisedRows
from ingot.weight_formats import W4, W8

Float32 = npt.NDArray[np.float32]

MOST = W4.multiplier
_CHUNK = 1 << 18  # elements worked on at a time: what is tried again and again stays in the cache
_W8_CUTS = np.linspace(0.84, 1.01, 18, dtype=np.float32)  # of the scale that holds the largest magnitude
_W4_CUTS = np.linspace(0.74, 1.06, 9, dtype=np.float32)  # of the step that holds the group's extreme
_W4_TOPS = np.linspace(9, 17, 9, dtype=np.float32)  # multiplier that the row's largest step would have


def quantise(rows: Float32, precision: Precision) -> QuantisedRows:
    """[n, K] → quantised rows. A row that holds a NaN or an infinity gets the scale NaN, and so do all its products."""
    n, k = rows.shape
    group = precision.group
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    _, exponent = np.frexp(np.where(finite, np.abs(rows).max(axis=1, initial=0), np.float32(1)))
    scale, codes = np.empty(n, np.float32), np.empty((n, k), np.int8)
    multipliers = np.empty((n, -(-k // group)), np.int8) if group else None
    size = max(2, _CHUNK // k)
    for begin in range(0, n, size):
        count = min(size, n - begin)
        own = slice(begin, begin + count)
        part = np.zeros((max(2, count), k), np.float32)  # numpy adds up one row alone in another order
        # powers of two change no rounding, and no square of a number below 1 overflows
        np.ldexp(rows[own], -exponent[own, None], out=part[:count], where=finite[own, None])
        if multipliers is None:
            scale[own], codes[own] = (each[:count] for each in _search_w8(part))
        else:
            scale[own], multipliers[own], codes[own] = (each[:count] for each in _search_w4(part, group))
    scale = np.where(finite, np.ldexp(scale, exponent), np.float32(np.nan)).astype(np.float32)
    return QuantisedRows(scale=scale, codes=codes, multipliers=multipliers, group=group)


def _search_w8(rows: Float32) -> tuple[Float32, npt.NDArray[np.int8]]:
    """(scale [n], codes [n, K]); rows of zeros have the scale 0."""
    groups = _Groups(rows, rows.shape[1], W8.codes)  # one group, whose step is the scale
    top = np.abs(rows).max(axis=1)
    usual = np.where(top > 0, top, np.float32(1)).astype(np.float32) / np.float32(127)
    best, _ = _least(groups, usual, tuple(np.full_like(usual, cut) for cut in _W8_CUTS))
    best = usual * best
    fitted = _least_squares(groups, best, np.ones_like(best))
    best = np.where(groups.errors(fitted) < groups.errors(best), fitted, best)
    return np.where(top > 0, best, np.float32(0)), groups.codes_of_rows(best, rows.shape[1])


class _Groups:
    """The groups of some rows, side by side: element i of every group in one line, since steps differ by group.

    values  float32 [G, rows * groups per row]; the last group of a row is filled up with zeros, which cost nothing
    """

    def __init__(self, rows: Float32, group: int, limits: tuple[int, int]) -> None:
        """limits: the smallest and the largest code."""
        n, k = rows.shape
        self._limits = limits
        self.rows, self.per_row = n, -(-k // group)
        size = min(group, k)  # one group longer than the row needs no filling
        padded = np.zeros((n, self.per_row * size), np.float32)
        padded[:, :k] = rows
        self.values = np.ascontiguousarray(padded.reshape(-1, size).T)
        self._ratios, self._codes = np.empty_like(self.values), np.empty_like(self.values)

    def codes(self, step: Float32) -> Float32:
        """The codes nearest to values / step, valid until the next call."""
        np.multiply(self.values, np.float32(1) / step, out=self._ratios)
        np.rint(self._ratios, out=self._codes)
        return np.clip(self._codes, *self._limits, out=self._codes)

    def errors(self, step: Float32) -> Float32:
        """Squared error of every group under its step."""
        codes = self.codes(step)
        np.subtract(self._ratios, codes, out=self._ratios)
        np.multiply(self._ratios, self._ratios, out=self._ratios)
        return np.asarray(self._ratios.sum(axis=0) * (step * step), np.float32)

    def by_row(self, values: Float32) -> Float32:
        """One number per group → their sums per row."""
        sums: Float32 = values.reshape(self.rows, self.per_row).sum(axis=1)
        return sums

    def spread(self, scale: Float32) -> Float32:
        """One number per row → one per group."""
        return np.repeat(scale, self.per_row)

    def codes_of_rows(self, step: Float32, k: int) -> npt.NDArray[np.int8]:
        """Codes as int8 [rows, k]."""
        codes = self.codes(step).astype(np.int8)
        return np.ascontiguousarray(codes.T.reshape(self.rows, -1)[:, :k])


def _search_w4(rows: Float32, group: int) -> tuple[Float32, npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """(scale [n], multipliers [n, groups], codes [n, K])"""
    groups = _Groups(rows, group, W4.codes)
    steps, dead = _free_steps(groups)
    top = np.where(dead, np.float32(0), np.abs(steps)).reshape(groups.rows, -1).max(axis=1)
    live = top > 0
    top = np.where(live, top, np.float32(1)).astype(np.float32)
    scale: Float32 = (top / np.float32(MOST)).astype(np.float32)
    multipliers, least = steps, np.full(groups.rows, np.inf, np.float32)
    for most in _W4_TOPS:
        attempt: Float32 = top / most
        whole, errors = _nearest(groups, attempt, steps)
        scale, multipliers, least = _better(groups, (attempt, whole, errors), (scale, multipliers, least))
    attempt = _least_squares(groups, scale, multipliers)
    whole, errors = _around(groups, attempt, multipliers)
    scale, multipliers, least = _better(groups, (attempt, whole, errors), (scale, multipliers, least))
    codes = groups.codes_of_rows(groups.spread(scale) * multipliers, rows.shape[1])
    whole_numbers = multipliers.astype(np.int8).reshape(groups.rows, -1)
    return np.where(live, scale, np.float32(0)), whole_numbers, codes


_Choice = tuple[Float32, Float32, Float32]  # scale per row, multiplier per group, error: per group, or per row


def _free_steps(groups: _Groups) -> tuple[Float32, npt.NDArray[np.bool_]]:
    """(the best step of each group by itself, groups of nothing but zeros, whose step is 1)."""
    high, low = groups.values.max(axis=0), groups.values.min(axis=0)
    extreme = np.where(high > -low, high, low)
    dead = extreme == 0
    extreme = np.where(dead, np.float32(1), extreme)
    best, least = extreme, np.full(len(extreme), np.inf, np.float32)
    for end in W4.codes:
        for cut in _W4_CUTS:
            step = extreme * (cut / np.float32(end))
            errors = groups.errors(step)
            best, least = np.where(errors < least, step, best), np.minimum(errors, least)
    return best, dead


def _nearest(groups: _Groups, scale: Float32, steps: Float32) -> tuple[Float32, Float32]:
    """(multipliers, errors): for each group the better of the two whole multiples of the scale beside its step."""
    wide = groups.spread(scale)
    ratio = np.abs(steps) / wide
    sign = np.sign(steps)
    below, above = (np.clip(rounded, 1, MOST) * sign for rounded in (np.floor(ratio), np.ceil(ratio)))
    return _least(groups, wide, (below, above))


def _around(groups: _Groups, scale: Float32, multipliers: Float32) -> tuple[Float32, Float32]:
    """(multipliers, errors): for each group the best of the present one and its neighbours, of both signs."""
    size, sign = np.abs(multipliers), np.sign(multipliers)
    around = [np.clip(size + change, 1, MOST) * sign for change in (0, -1, 1)]
    return _least(groups, groups.spread(scale), (*around, *(-each for each in around)))


def _least(groups: _Groups, wide: Float32, choices: tuple[Float32, ...]) -> tuple[Float32, Float32]:
    best, least = choices[0], np.full(len(wide), np.inf, np.float32)
    for each in choices:
        errors = groups.errors(wide * each)
        best, least = np.where(errors < least, each, best), np.minimum(errors, least)
    return best, least


def _better(groups: _Groups, new: _Choice, old: _Choice) -> _Choice:
    """For each row the choice with the smaller error."""
    error = groups.by_row(new[2])
    wins = error < old[2]
    multipliers = np.where(np.repeat(wins, groups.per_row), new[1], old[1])
    return np.where(wins, new[0], old[0]), multipliers, np.minimum(error, old[2])


def _least_squares(groups: _Groups, scale: Float32, multipliers: Float32) -> Float32:
    """The scale that fits each row best while its codes and multipliers stay."""
    codes = groups.codes(groups.spread(scale) * multipliers)
    along = groups.by_row((codes * groups.values).sum(axis=0) * multipliers)
    squares = groups.by_row((codes * codes).sum(axis=0) * (multipliers * multipliers))
    fitted = along / np.maximum(squares, np.float32(1))
    return np.where(fitted > 0, fitted, scale)
