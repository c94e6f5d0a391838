"""Rows that keep the codes of GGUF's K-quants: scales and offsets of groups are whole numbers of a unit.

    w3k, w6k           W[n, k] = scale[n] * (code[n, k] * s)
    w2ks, w4ks, w5ks   W[n, k] = scale[n] * (code[n, k] * s + o)
    s = count[n, j] * unit[n, u], o = offset_count[n, j] * offset_unit[n, u]      j = k // group, u = k // UNIT_COLUMNS

Both products are exact in float32: a unit is a float16, a count a byte. With int8 activations a product adds up count *
code * a, and offset_count * a, over the columns of a unit in int32, which is exact, and goes on in float32, units
ascending: every instruction set and every blocking gives the same bits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.plugins.grouped import fma
from ingot.plugins.quantised import Float32, Int8
from ingot.weight_formats import FORMATS, UNIT_COLUMNS, WeightFormat

# (bits of a code, whether there are offsets)
_FORMATS = {(each.bits, each.group_bytes > 1): each for each in FORMATS.values() if each.unit_bytes}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnitRows:
    """Rows [N, K] of a weight; of experts [experts, N, K], and so everything else.

    scale         float32 [N]
    codes         int8 [N, K], within those of the format
    count         int8 [N, ceil(K / group)], of scales; of w2ks and w4ks none is negative
    unit          float32 [N, ceil(K / UNIT_COLUMNS)], numbers that float16 holds
    offset_count  as count; None for w3k and w6k
    offset_unit   as unit; None for w3k and w6k
    bits          of a code, 2 to 6
    group         columns of a group; the last one of a row may be shorter
    """

    scale: Float32
    codes: Int8
    count: Int8
    unit: Float32
    offset_count: Int8 | None = None
    offset_unit: Float32 | None = None
    bits: int
    group: int

    @property
    def format(self) -> WeightFormat:
        return _FORMATS[self.bits, self.offset_count is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def group_scale(self) -> Float32:
        """s of each group, [N, groups]."""
        return _in_units(self.count, self.unit, self.group)

    @property
    def offset(self) -> Float32 | None:
        """o of each group, [N, groups]; None for w3k and w6k."""
        if self.offset_count is None or self.offset_unit is None:
            return None
        return _in_units(self.offset_count, self.offset_unit, self.group)

    @property
    def unscaled(self) -> Float32:
        """What the row's scale multiplies, float32 [N, K]."""
        values: Float32 = self.codes.astype(np.float32) * self._spread(self.group_scale)
        offset = self.offset
        return values if offset is None else values + self._spread(offset)

    @property
    def values(self) -> Float32:
        """What the rows stand for, float32 [N, K]."""
        return self.unscaled * self.scale[..., None]

    def take(self, rows: npt.NDArray[np.integer] | int) -> "UnitRows":
        """The rows of these numbers; the matrix of the expert of this number."""
        return self._each(lambda part: part[rows])

    def columns(self, begin: int, end: int) -> "UnitRows":
        """These columns, which begin and end where units do."""
        groups, units = _range(begin, end, self.group), _range(begin, end, UNIT_COLUMNS)
        return dataclasses.replace(
            self,
            codes=self.codes[..., begin:end],
            count=self.count[..., groups],
            unit=self.unit[..., units],
            offset_count=None if self.offset_count is None else self.offset_count[..., groups],
            offset_unit=None if self.offset_unit is None else self.offset_unit[..., units],
        )

    def int8_product(self, a: Int8) -> Float32:
        """Sums of a [rows, K] times what the rows' scales multiply, float32 [rows, N].

        For each unit, ascending: total = fma(float32(sum of count * code * a), unit, total); where there are offsets
        total = fma(float32(sum of offset_count * a), offset_unit, total). `fma` says how it is computed here.
        """
        total = np.zeros((len(a), self.shape[0]), np.float32)
        scaled = self.codes.astype(np.float64) * self._spread(self.count)
        offsets = None if self.offset_count is None else self._spread(self.offset_count).astype(np.float64)
        for j, k in enumerate(range(0, self.shape[1], UNIT_COLUMNS)):
            columns = np.s_[:, k : k + UNIT_COLUMNS]
            part = a[columns].astype(np.float64)
            total = fma((part @ scaled[columns].T).astype(np.float32), self.unit[:, j], total)
            if offsets is not None and self.offset_unit is not None:
                total = fma((part @ offsets[columns].T).astype(np.float32), self.offset_unit[:, j], total)
        return total

    def _spread(self, groups: npt.NDArray[Any]) -> npt.NDArray[Any]:
        spread: npt.NDArray[Any] = np.repeat(groups, self.group, axis=-1)[..., : self.shape[-1]]
        return spread

    def _each(self, change: Callable[[Any], Any]) -> "UnitRows":
        return _joined([self], lambda parts: change(parts[0]))


def joined_units(parts: Sequence[UnitRows]) -> UnitRows:
    """Rows of one format, one below the other."""
    return _joined(parts, np.concatenate)


def stacked_units(experts: Sequence[UnitRows]) -> UnitRows:
    """Matrices of one form as one weight [experts, N, K]."""
    return _joined(experts, np.stack)


def _joined(parts: Sequence[UnitRows], join: Callable[[Sequence[Any]], Any]) -> UnitRows:
    offsets = [(each.offset_count, each.offset_unit) for each in parts if each.offset_count is not None]
    counts, units = zip(*offsets, strict=True) if offsets else (None, None)
    return UnitRows(
        scale=join([each.scale for each in parts]),
        codes=join([each.codes for each in parts]),
        count=join([each.count for each in parts]),
        unit=join([each.unit for each in parts]),
        offset_count=None if counts is None else join(counts),
        offset_unit=None if units is None else join(units),
        bits=parts[0].bits,
        group=parts[0].group,
    )


def _in_units(count: Int8, unit: Float32, group: int) -> Float32:
    spread: Float32 = np.repeat(unit, UNIT_COLUMNS // group, axis=-1)[..., : count.shape[-1]]
    return count.astype(np.float32) * spread


def _range(begin: int, end: int, size: int) -> slice:
    return slice(begin // size, -(-end // size))
