"""Rows that keep a quantised checkpoint's codes: groups of columns with float16 scales.

    w2t .. w8t   W[n, k] = scale[n] * (value[n, k] * group_scale[n, k // G])
    w4ts, w8ts   W[n, k] = scale[n] * ((value[n, k] - shift[n, k // G]) * group_scale[n, k // G])    shift: a zero point
                 W[n, k] = scale[n] * (value[n, k] * group_scale[n, k // G] + shift[n, k // G])      shift: an offset

The value of a code of 2 to 4 bits is table[n, code], a whole number; of 4 bits it may be one and so many 256ths
(`more_bits`). A code of 8 bits is the value. The rows of a panel share a table, and their shifts are of one kind. With
int8 activations a product adds up value * a in int32 for each group, which is exact, and goes on in float32, groups
ascending: every instruction set and every blocking gives the same bits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.plugins.quantised import Float32, Int8
from ingot.weight_formats import W2T, W3T, W4T, W4TS, W8T, W8TS, WeightFormat

# (bits of a code, whether there are shifts)
_WITH_TABLE = {(2, False): W2T, (3, False): W3T, (4, False): W4T, (4, True): W4TS}
_MORE_UNIT = np.float32(1 / 256)  # what one of more_bits is worth


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows [N, K] of a weight; of experts [experts, N, K], and so everything else.

    scale        float32 [N]
    codes        [N, K], from 0 on (uint8); where there is no table int8
    bits         of a code that stands for a value of the table: 2, 3 or 4
    group_scale  float32 [N, ceil(K / group)], numbers that float16 holds
    table        int8 [N, 16], -127 to 127; None: codes are values
    more_bits    int8 [N, 16], 256ths that the table's values have beside it; None: none
    shift        as group_scale; None for w2t to w8t
    is_offset    bool [N], what the shift is
    group        columns of a group; the last one of a row may be shorter
    """

    scale: Float32
    codes: npt.NDArray[np.uint8] | Int8
    group_scale: Float32
    table: Int8 | None
    more_bits: Int8 | None = None
    shift: Float32 | None = None
    is_offset: npt.NDArray[np.bool_]
    bits: int = 4
    group: int

    @property
    def format(self) -> WeightFormat:
        if self.table is None:
            return W8T if self.shift is None else W8TS
        return _WITH_TABLE[self.bits, self.shift is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def unscaled(self) -> Float32:
        """What the row's scale multiplies, float32 [N, K]."""
        values = self._table_values()
        if self.shift is None:
            return values * self._spread(self.group_scale)
        offset, shift, scale = self.is_offset[..., None], self._spread(self.shift), self._spread(self.group_scale)
        return np.where(offset, values * scale + shift, (values - shift) * scale)

    @property
    def values(self) -> Float32:
        """What the rows stand for, float32 [N, K]."""
        return self.unscaled * self.scale[..., None]

    def take(self, rows: npt.NDArray[np.integer] | int) -> "GroupedRows":
        """The rows of these numbers; the matrix of the expert of this number."""
        return dataclasses.replace(
            self,
            scale=self.scale[rows],
            codes=self.codes[rows],
            group_scale=self.group_scale[rows],
            table=None if self.table is None else self.table[rows],
            more_bits=None if self.more_bits is None else self.more_bits[rows],
            shift=None if self.shift is None else self.shift[rows],
            is_offset=self.is_offset[rows],
        )

    def int8_product(self, a: Int8) -> Float32:
        """Sums of a [rows, K] times what the rows' scales multiply, float32 [rows, N].

        For each group, ascending: s = float32(sum of value * a); of a zero point s = fma(-shift, A, s), A the sum of a;
        total = fma(s, group_scale, total); of an offset total = fma(shift, A, total); where there are more bits total =
        fma(float32(sum of more_bits * a), group_scale / 256, total).
        """
        total = np.zeros((len(a), self.shape[0]), np.float32)
        values, rest = self._whole_values(), None if self.more_bits is None else self._by_code(self.more_bits)
        for j, k in enumerate(range(0, self.shape[1], self.group)):
            part = a[:, k : k + self.group].astype(np.float32)
            s = part @ values[:, k : k + self.group].T  # exact: below 2^24
            sums = part.sum(axis=1)[:, None]
            if self.shift is not None:
                s = np.where(self.is_offset, s, fma(-self.shift[:, j], sums, s))
            total = fma(self.group_scale[:, j], s, total)
            if self.shift is not None:
                total = np.where(self.is_offset, fma(self.shift[:, j], sums, total), total)
            if rest is not None:
                total = fma(self.group_scale[:, j] * _MORE_UNIT, part @ rest[:, k : k + self.group].T, total)
        return total

    def _table_values(self) -> Float32:
        values = self._whole_values()
        return values if self.more_bits is None else values + self._by_code(self.more_bits) * _MORE_UNIT

    def _whole_values(self) -> Float32:
        return self.codes.astype(np.float32) if self.table is None else self._by_code(self.table)

    def _by_code(self, table: Int8) -> Float32:
        return np.take_along_axis(table, self.codes.astype(np.intp), axis=-1).astype(np.float32)

    def _spread(self, groups: Float32) -> Float32:
        return np.repeat(groups, self.group, axis=-1)[..., : self.shape[-1]]


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c in float64, whose second rounding hardly ever shows."""
    found: Float32 = (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)
    return found


def stacked_grouped(experts: Sequence[GroupedRows]) -> GroupedRows:
    """Matrices of one form as one weight [experts, N, K]."""
    return _together(experts, np.stack)


def joined(parts: Sequence[GroupedRows]) -> GroupedRows:
    """Rows one below the other; where some have shifts or more bits, all have."""
    shifted, finer = (any(each is not None for each in of) for of in zip(*map(_optional, parts), strict=True))
    whole = []
    for each in parts:
        shift, more = _optional(each)
        if shifted and shift is None:
            shift = np.zeros_like(each.group_scale)
        if finer and more is None:
            assert each.table is not None, "bytes have no further bits, nor those beside them"
            more = np.zeros_like(each.table)
        whole.append(dataclasses.replace(each, shift=shift, more_bits=more))
    return _together(whole, np.concatenate)


def _optional(rows: GroupedRows) -> tuple[Float32 | None, Int8 | None]:
    return rows.shift, rows.more_bits


def _together(parts: Sequence[GroupedRows], join: Callable[[Sequence[Any]], Any]) -> GroupedRows:
    shifts = [each.shift for each in parts if each.shift is not None]
    more_bits = [each.more_bits for each in parts if each.more_bits is not None]
    tables = [each.table for each in parts if each.table is not None]
    return GroupedRows(
        scale=join([each.scale for each in parts]),
        codes=join([each.codes for each in parts]),
        group_scale=join([each.group_scale for each in parts]),
        table=join(tables) if tables else None,
        more_bits=join(more_bits) if more_bits else None,
        shift=join(shifts) if shifts else None,
        is_offset=join([each.is_offset for each in parts]),
        bits=parts[0].bits,
        group=parts[0].group,
    )
