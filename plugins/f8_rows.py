"""Rows that keep the bytes of FP8 (E4M3) and their float32 scales.

    f8     W[n, k] = scale[n] * number[n, k]
    f8gG   W[n, k] = scale[n] * (number[n, k] * group_scale[n, k // G])    the inner product rounded to float32

A product takes its inputs as floats, and adds up input * (number * group_scale).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32
from ingot.plugins.quantised import Float32
from ingot.weight_formats import F8, WeightFormat


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
