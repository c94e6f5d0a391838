"""Rows that keep the bytes of FP8 (E4M3) and their float32 scales.

    f8     W[n, k] = scale[n] * number[n, k]
    f8gG   W[n, k] = scale[n] * (number[n, k] * group_scale[n, k // G])    the inner product rounded to float32

A product takes its inputs as floats, and adds up input * (number * group_scale). Or it rounds them to FP8, too: each
row of inputs has a float32 scale, or one for each of the weight's groups of columns.

    f8       y[m, n] = float32(sum of a[m, k] * number[n, k]) * a_scale[m] * scale[n]
    f8g128   y[m, n] = float32(sum over j of sum_j * (a_scale[m, j] * group_scale[n, j])) * scale[n]
             sum_j: of a[m, k] * number[n, k] over the columns of group j
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, round_to_f8, to_float32
from ingot.plugins.quantised import Float32
from ingot.weight_formats import F8, WeightFormat

INPUT_GROUPS = (0, 128)  # columns of a group in weights whose products may round their inputs to FP8; 0: a row
_LARGEST = np.float32(448)  # number of E4M3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundedRows:
    """Inputs of products, as `round_inputs` makes them. numbers: float32 [rows, K]; scales: [rows, groups]."""

    numbers: Float32
    scales: Float32

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: npt.NDArray[np.integer]) -> "RoundedRows":
        """The rows of these numbers."""
        return RoundedRows(numbers=self.numbers[rows], scales=self.scales[rows])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class F8Rows:
    """Rows [N, K] of a weight; of experts [experts, N, K], and so everything else.

    scale        float32 [N]
    codes        uint8 [N, K], the bits of E4M3FN
    group_scale  float32 [N, ceil(K / group)]; None without groups
    group        columns of a group, the last one of a row may be shorter; 0 without groups
    """

    scale: Float32
    codes: npt.NDArray[np.uint8]
    group_scale: Float32 | None = None
    group: int = 0

    @property
    def format(self) -> WeightFormat:
        return F8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def unscaled(self) -> Float32:
        """What the row's scale multiplies, float32 [N, K]."""
        numbers = to_float32(self.codes, DType.F8)
        if self.group_scale is None:
            return numbers
        return numbers * np.repeat(self.group_scale, self.group, axis=-1)[..., : self.shape[-1]]

    @property
    def values(self) -> Float32:
        """What the rows stand for, float32 [N, K]."""
        return self.unscaled * self.scale[..., None]

    def take(self, rows: npt.NDArray[np.integer] | int) -> "F8Rows":
        """The rows of these numbers; the matrix of the expert of this number."""
        groups = None if self.group_scale is None else self.group_scale[rows]
        return dataclasses.replace(self, scale=self.scale[rows], codes=self.codes[rows], group_scale=groups)

    def product(self, x: Float32 | RoundedRows) -> Float32:
        """x @ rows.T with x rounded to FP8, float32 [rows of x, N]; of rows [N, K]. Each float32 product above is
        rounded once; sums are float32 or wider."""
        numbers, a_scale = (x.numbers, x.scales) if isinstance(x, RoundedRows) else round_inputs(x, self.group)
        a, w = numbers.astype(np.float64), to_float32(self.codes, DType.F8).astype(np.float64)
        if self.group_scale is None:
            y: Float32 = (a @ w.T).astype(np.float32) * a_scale * self.scale
            return y
        total = np.zeros((len(a), len(w)))
        for j in range(a_scale.shape[1]):
            columns = np.s_[:, j * self.group : (j + 1) * self.group]
            total += a[columns] @ w[columns].T * (a_scale[:, j, None] * self.group_scale[:, j])
        return total.astype(np.float32) * self.scale


def round_inputs(x: Float32, group: int = 0) -> tuple[Float32, Float32]:
    """Rows [rows, K] of activations as numbers of FP8 (float32 [rows, K]) and scales (float32 [rows, groups]): the
    largest magnitude of a row, or of its `group` columns, becomes the largest number.

    What is below 2^-119 throughout (448 over it is infinite) becomes zeros; what holds a NaN or an infinity gets the
    scale NaN, and so do all its products.
    """
    k = x.shape[1]
    columns = group or k
    padded = np.pad(x, ((0, 0), (0, -k % columns))).reshape(len(x), -(-k // columns), columns)
    top = np.abs(padded).max(axis=2)
    finite = np.isfinite(top)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = _LARGEST / top
        usable = finite & np.isfinite(inverse)
        numbers = np.where(usable[..., None], round_to_f8(padded * inverse[..., None]), np.float32(0))
    scale = np.where(finite, top / _LARGEST, np.float32(np.nan)).astype(np.float32)
    return np.ascontiguousarray(numbers.reshape(padded.shape[0], padded.shape[1] * columns)[:, :k]), scale


def stacked_f8(experts: Sequence[F8Rows]) -> F8Rows:
    """Matrices of one form as one weight [experts, N, K]."""
    return _together(experts, np.stack)


def joined_f8(parts: Sequence[F8Rows]) -> F8Rows:
    """Rows of one form, one below the other."""
    return _together(parts, np.concatenate)


def _together(parts: Sequence[F8Rows], join: Callable[[Sequence[Any]], Any]) -> F8Rows:
    groups = [each.group_scale for each in parts if each.group_scale is not None]
    return F8Rows(
        scale=join([each.scale for each in parts]),
        codes=join([each.codes for each in parts]),
        group_scale=join(groups) if groups else None,
        group=parts[0].group,
    )
