"""Rows that keep a quantised checkpoint's codes: groups of columns with float16 scales, codes that stand for values.

    w4t    W[n, k] = scale[n] * (table[code] * group_scale[n, k // G])
    w4ts   W[n, k] = scale[n] * ((table[code] - shift[n, k // G]) * group_scale[n, k // G])    shift: a zero point
           W[n, k] = scale[n] * (table[code] * group_scale[n, k // G] + shift[n, k // G])      shift: an offset

With int8 activations a product adds up table[code] * a in int32 for each group, which is exact, and goes on in float32,
groups ascending: every instruction set and every blocking gives the same bits.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.plugins.quantised import Float32, Int8, QuantisedRows
from ingot.weight_formats import W4T, W4TS, WeightFormat

LINEAR = np.arange(16, dtype=np.int8)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRows:
    """Rows [N, K] of a weight; of experts [experts, N, K], and so everything else but the table.

    scale        float32 [N]
    codes        uint8 [N, K], 0 to 15
    group_scale  float32 [N, ceil(K / group)], numbers that float16 holds
    table        int8 [16], -127 to 127
    shift        as group_scale; None for w4t
    is_offset    what the shift is
    group        columns of a group; the last one of a row may be shorter
    """

    scale: Float32
    codes: npt.NDArray[np.uint8]
    group_scale: Float32
    table: Int8
    shift: Float32 | None = None
    is_offset: bool = False
    group: int

    @property
    def format(self) -> WeightFormat:
        return W4T if self.shift is None else W4TS

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def unscaled(self) -> Float32:
        """What the row's scale multiplies, float32 [N, K]."""
        values = self.table.astype(np.float32)[self.codes]
        if self.shift is not None and not self.is_offset:
            values -= self._spread(self.shift)
        values *= self._spread(self.group_scale)
        if self.shift is not None and self.is_offset:
            values += self._spread(self.shift)
        return values

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
            shift=None if self.shift is None else self.shift[rows],
        )

    def int8_product(self, a: Int8) -> Float32:
        """Sums of a [rows, K] times what the rows' scales multiply, float32 [rows, N].

        For each group, ascending: s = float32(sum of table[code] * a); of a zero point s = fma(-shift, A, s), A the sum
        of a; total = fma(s, group_scale, total); of an offset total = fma(shift, A, total). Here fma is computed in
        float64, whose second rounding hardly ever shows.
        """
        total = np.zeros((len(a), self.shape[0]), np.float32)
        values = self.table.astype(np.float32)[self.codes]
        for j, k in enumerate(range(0, self.shape[1], self.group)):
            part = a[:, k : k + self.group].astype(np.float32)
            s = (part @ values[:, k : k + self.group].T).astype(np.float64)  # exact: below 2^24
            sums = part.sum(axis=1, dtype=np.float64)[:, None]
            if self.shift is not None and not self.is_offset:
                s = (s - self.shift[:, j].astype(np.float64) * sums).astype(np.float32).astype(np.float64)
            total = (s * self.group_scale[:, j].astype(np.float64) + total).astype(np.float32)
            if self.shift is not None and self.is_offset:
                total = (self.shift[:, j].astype(np.float64) * sums + total).astype(np.float32)
        return total

    def _spread(self, groups: Float32) -> Float32:
        return np.repeat(groups, self.group, axis=-1)[..., : self.shape[-1]]


WeightRows = QuantisedRows | GroupedRows


def stacked_grouped(experts: Sequence[GroupedRows]) -> GroupedRows:
    """Matrices of one form as one weight [experts, N, K]."""
    shifts = [each.shift for each in experts if each.shift is not None]
    return dataclasses.replace(
        experts[0],
        scale=np.stack([each.scale for each in experts]),
        codes=np.stack([each.codes for each in experts]),
        group_scale=np.stack([each.group_scale for each in experts]),
        shift=np.stack(shifts) if shifts else None,
    )
