"""The element types that ingot stores, with their names in numpy, ONNX and safetensors.

bf16 has no numpy type: arrays carry its bits as uint16, and `to_float32` / `from_float32` convert. w8 and w4 are
quantised rows: integers that share scales, bytes that mean something only in their layout (`plugins/layouts.py`).
"""

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from ingot.weight_formats import FORMATS, QUANTISED, WeightFormat


class DType(enum.Enum):
    """value: the name in plans, manifests and kernel names."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "int8"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"
    W8 = "w8"
    W4 = "w4"

    @property
    def weight_format(self) -> WeightFormat | None:
        """Of quantised rows."""
        return FORMATS.get(self.value)

    @property
    def is_quantised(self) -> bool:
        return self.weight_format is not None

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The numpy type of the stored bits (uint16 for bf16, bytes for quantised rows)."""
        return _STORAGE[self]

    @property
    def onnx(self) -> int:
        """The number of this type in ONNX's TensorProto.DataType."""
        return _ONNX[self]

    @property
    def safetensors(self) -> str:
        return _SAFETENSORS[self]

    @classmethod
    def from_safetensors(cls, name: str) -> "DType | None":
        """The type called `name` in a safetensors header, or None if ingot has no use for it."""
        return _FROM_SAFETENSORS.get(name)

    @classmethod
    def from_onnx(cls, number: int) -> "DType | None":
        return _FROM_ONNX.get(number)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How weights are stored, e.g. bf16 or w4g128. group: columns that share a multiplier; 0 where there are none."""

    dtype: DType
    group: int = 0

    @classmethod
    def parse(cls, name: str) -> "Precision":
        """Inverse of `str`. Raises ValueError for what is no precision."""
        if name not in PRECISIONS:
            raise ValueError(f"{name!r} is no precision")
        dtype, _, group = name.partition("g")
        return cls(dtype=DType(dtype), group=int(group or 0))

    def __str__(self) -> str:
        return self.dtype.value + (f"g{self.group}" if self.group else "")


PRECISIONS = ("f32", "bf16", "f16", *QUANTISED)
_ITEMSIZE = {
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I8: 1,
    DType.I32: 4,
    DType.I64: 8,
    DType.BOOL: 1,
    DType.W8: 1,
    DType.W4: 1,
}
_STORAGE: dict[DType, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.I8: np.dtype(np.int8),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.BOOL: np.dtype(np.bool_),
    DType.W8: np.dtype(np.uint8),
    DType.W4: np.dtype(np.uint8),
}
_ONNX = {DType.F32: 1, DType.F16: 10, DType.BF16: 16, DType.I8: 3, DType.I32: 6, DType.I64: 7, DType.BOOL: 9}
_SAFETENSORS = {
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.I8: "I8",
    DType.I32: "I32",
    DType.I64: "I64",
    DType.BOOL: "BOOL",
}
_FROM_SAFETENSORS = {name: dtype for dtype, name in _SAFETENSORS.items()}
_FROM_ONNX = {number: dtype for dtype, number in _ONNX.items()}

_EXPONENT = {DType.F32: (np.uint32, 0x7F800000), DType.F16: (np.uint16, 0x7C00), DType.BF16: (np.uint16, 0x7F80)}


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact: a bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN stays a (quiet) NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    stored = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        stored[nan] = (bits[nan] >> 16) | 0x40
    return stored


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The float32 values nearest to `values` that bf16 can hold."""
    return bf16_to_float32(float32_to_bf16(values))


def count_nonfinite(bits: npt.NDArray[np.generic], dtype: DType) -> int:
    """How many stored values have all exponent bits set: NaN and the infinities."""
    unsigned, exponent = _EXPONENT[dtype]
    return int(np.count_nonzero((bits.view(unsigned) & unsigned(exponent)) == exponent))


def to_float32(stored: npt.NDArray[np.generic], dtype: DType) -> npt.NDArray[np.float32]:
    """Stored bits of `dtype` as float32 (exact for f32, f16 and bf16)."""
    if dtype is DType.BF16:
        return bf16_to_float32(stored.view(np.uint16))
    return stored.astype(np.float32)


def from_float32(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.generic]:
    """float32 values as stored bits of `dtype`, rounded to nearest even."""
    if dtype is DType.BF16:
        return float32_to_bf16(values)
    return values.astype(dtype.storage)
