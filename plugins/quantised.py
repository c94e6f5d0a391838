"""Quantised rows: what stands between the bytes of a w8 or w4 weight and the arithmetic on it.

    w8     W[n, k] = scale[n] * codes[n, k]                              codes -127 .. 127
    w4gG   W[n, k] = scale[n] * multipliers[n, k // G] * codes[n, k]     codes -8 .. 7, multipliers -15 .. 15, not 0

The integers q = multipliers * codes fit a signed byte, so that a product adds up integers over the whole row and
multiplies once by the row's scale, whatever the precision.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.weight_formats import W4, W8, WeightFormat

Float32 = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]

MAX_K = 131_000  # 127 * 128 * MAX_K still fits the int32 that adds up q * a


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantisedRows:
    """Rows [N, K] of a weight; of experts [experts, N, K], and so everything else.

    scale        float32 [N]
    codes        int8 [N, K]
    multipliers  int8 [N, ceil(K / group)]; None for w8
    group        columns that share a multiplier; 0 for w8. The last group of a row may be shorter
    """

    scale: Float32
    codes: Int8
    multipliers: Int8 | None = None
    group: int = 0

    @property
    def format(self) -> WeightFormat:
        return W8 if self.multipliers is None else W4

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def integers(self) -> Int8:
        """q, int8 [N, K]."""
        if self.multipliers is None:
            return self.codes
        return self.codes * np.repeat(self.multipliers, self.group, axis=-1)[..., : self.codes.shape[-1]]

    @property
    def values(self) -> Float32:
        """What the rows stand for: scale * q, float32 [N, K]."""
        return self.integers.astype(np.float32) * self.scale[..., None]

    def take(self, rows: npt.NDArray[np.integer] | int) -> "QuantisedRows":
        """The rows of these numbers; the matrix of the expert of this number."""
        multipliers = None if self.multipliers is None else self.multipliers[rows]
        return dataclasses.replace(self, scale=self.scale[rows], codes=self.codes[rows], multipliers=multipliers)


def stacked(experts: Sequence[QuantisedRows]) -> QuantisedRows:
    """Matrices of one shape as one weight [experts, N, K]."""
    multipliers = [each.multipliers for each in experts if each.multipliers is not None]
    return QuantisedRows(
        scale=np.stack([each.scale for each in experts]),
        codes=np.stack([each.codes for each in experts]),
        multipliers=np.stack(multipliers) if multipliers else None,
        group=experts[0].group,
    )


def round_to_int8(x: Float32) -> tuple[Int8, Float32]:
    """Rows [rows, K] of activations, keys or values as (int8 [rows, K], scale [rows]), symmetric per row.

    A row whose largest magnitude is below 2^-121 (127 over it is infinite) becomes zeros; a row that holds a NaN or an
    infinity gets the scale NaN, and so do all its products.
    """
    top = np.abs(x).max(axis=1, initial=0.0)
    finite = np.isfinite(top)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / top
        rounded = np.rint(x * inverse[:, None])
    usable = finite & np.isfinite(inverse)
    codes = np.where(usable[:, None], rounded, np.float32(0)).astype(np.int8)
    return codes, np.where(finite, top / np.float32(127), np.float32(np.nan)).astype(np.float32)
