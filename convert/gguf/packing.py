"""How blocks of a GGUF tensor lie: what a type says of them, and how fields of their bytes are read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.form import Code
from ingot.dtypes import DType

Raw = npt.NDArray[np.uint8]  # [B, bytes]
Array = npt.NDArray[Any]
Take = Callable[[Raw], Array]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a block lies: code, group as in `Quantised`; codes [B, size] a byte each; scale and offset [B, size / group].

    scale_dtype, offset_dtype: of the scales, of the offsets. scale_unit, offset_unit: float16 [B, 1], where they are
    integers.
    """

    code: Code
    group: int
    codes: Take
    scale: Take
    scale_dtype: DType
    offset: Take | None = None
    offset_dtype: DType = DType.F32
    scale_unit: Take | None = None
    offset_unit: Take | None = None
    table: tuple[float, ...] = ()


def half(raw: Raw, at: int) -> Array:
    """The float16 at a byte of each block, as float32 [B, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def stored_half(at: int) -> Take:
    return lambda raw: np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def negative_half(at: int) -> Take:
    return lambda raw: -stored_half(at)(raw)


def halves(stream: Raw) -> Array:
    """Bytes [B, n] → codes [B, 2n]: all low nibbles, then all high ones."""
    return np.concatenate([stream & 15, stream >> 4], axis=1)


def planes(stream: Raw, wide: int, bits: int) -> Array:
    """Bytes [B, n] → fields [B, n * 8 / bits]: of every `wide` bytes all lowest fields, then all next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = stream.reshape(len(stream), -1, 1, wide) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(stream), -1)


def signed(codes: Array, middle: int) -> Array:
    return codes.astype(np.int8) - np.int8(middle)
