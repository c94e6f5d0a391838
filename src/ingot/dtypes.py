"""The element types that ingot stores, with their names in numpy, ONNX and safetensors.

bf16 has no numpy type: arrays carry its bits as uint16, and `to_float32` / `from_float32` convert. f8 (E4M3FN) is
carried as uint8; in an engine, f8 is rows that share scales. w8, w4 and those with t or k are such rows, of integers:
bytes that mean something only in their layout (`plugins/layouts.py`). bf16c is bf16 in 12 bits, without loss.
"""

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from ingot.weight_formats import FORMATS, KEPT, QUANTISED, WeightFormat


class DType(enum.Enum):
    """value: the name in plans, manifests and kernel names."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "int8"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"
    U8 = "u8"
    F8 = "f8"
    BF16C = "bf16c"
    W8 = "w8"
    W4 = "w4"
    W2T = "w2t"
    W3T = "w3t"
    W4T = "w4t"
    W4TS = "w4ts"
    W8T = "w8t"
    W8TS = "w8ts"
    W2KS = "w2ks"
    W3K = "w3k"
    W4KS = "w4ks"
    W5KS = "w5ks"
    W6K = "w6k"

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of quantised rows, None for other types."""
        return FORMATS.get(self.value)

    @property
    def is_quantised(self) -> bool:
        return self.weight_format is not None

    @property
    def has_units(self) -> bool:
        """Whether scales of groups are whole numbers of units."""
        return self.weight_format is not None and self.weight_format.unit_bytes > 0

    @property
    def numbers(self) -> "DType":
        """The type of the numbers that a type which stores them in fewer bits, without loss, stands for."""
        return DType.BF16 if self is DType.BF16C else self

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
    """How weights are stored, e.g. bf16 or w4g128. group: columns that share a multiplier or scale; 0: none do."""

    dtype: DType
    group: int = 0

    @classmethod
    def parse(cls, name: str) -> "Precision":
        """Inverse of `str`. Raises ValueError for what is not a precision."""
        if name not in STORED:
            raise ValueError(f"{name!r} is not a precision")
        dtype, _, group = name.partition("g")
        return cls(dtype=DType(dtype), group=int(group or 0))

    def __str__(self) -> str:
        return self.dtype.value + (f"g{self.group}" if self.group else "")


PRECISIONS = ("f32", "bf16", "f16", *QUANTISED)  # that options offer
STORED = (*PRECISIONS, DType.BF16C.value, *KEPT)  # that a weight of an engine may have
KV_CODES = (DType.I8, DType.F8)  # of a KV cache whose keys and values are codes times scales
_ITEMSIZE = {
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I8: 1,
    DType.I32: 4,
    DType.I64: 8,
    DType.BOOL: 1,
    DType.U8: 1,
    DType.BF16C: 1,
    **{DType(name): 1 for name in FORMATS},
}
_STORAGE: dict[DType, np.dtype[np.generic]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.I8: np.dtype(np.int8),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.BOOL: np.dtype(np.bool_),
    DType.U8: np.dtype(np.uint8),
    DType.BF16C: np.dtype(np.uint8),
    **{DType(name): np.dtype(np.uint8) for name in FORMATS},
}
_ONNX = {
    DType.F32: 1,
    DType.F16: 10,
    DType.BF16: 16,
    DType.I8: 3,
    DType.I32: 6,
    DType.I64: 7,
    DType.BOOL: 9,
    DType.U8: 2,
    DType.F8: 17,
}
_SAFETENSORS = {
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.I8: "I8",
    DType.I32: "I32",
    DType.I64: "I64",
    DType.BOOL: "BOOL",
    DType.U8: "U8",
    DType.F8: "F8_E4M3",
}
_FROM_SAFETENSORS = {name: dtype for dtype, name in _SAFETENSORS.items()}
_FROM_ONNX = {number: dtype for dtype, number in _ONNX.items()}

_NONFINITE = {  # what all NaN and infinities have set, in the bits of their type; f8 has no infinities
    DType.F32: (np.uint32, 0x7F800000),
    DType.F16: (np.uint16, 0x7C00),
    DType.BF16: (np.uint16, 0x7F80),
    DType.F8: (np.uint8, 0x7F),
}


def _f8_values() -> npt.NDArray[np.float32]:
    """What each byte of E4M3FN stands for: sign, 4 bits of exponent (bias 7), 3 bits of fraction."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    size = np.where(byte & 0x7F == 0x7F, np.nan, size)
    return np.where(byte & 0x80, -size, size).astype(np.float32)


_F8 = _f8_values()
_F8_NAN = 0x7F  # the largest number is the one before


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


def round_to_f8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest numbers of f8, to even ones where two are as near; what is larger becomes the largest."""
    size = np.minimum(np.abs(values), _F8[_F8_NAN - 1])
    _, exponent = np.frexp(size)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 4, -9))
    found: npt.NDArray[np.float32] = np.copysign(np.rint(size / step) * step, values).astype(np.float32)
    return found


def count_nonfinite(bits: npt.NDArray[np.generic], dtype: DType) -> int:
    """How many stored values are NaN or infinite; integers never are."""
    if dtype not in _NONFINITE:
        return 0
    unsigned, mark = _NONFINITE[dtype]
    return int(np.count_nonzero((bits.view(unsigned) & unsigned(mark)) == mark))


def to_float32(stored: npt.NDArray[np.generic], dtype: DType) -> npt.NDArray[np.float32]:
    """Stored bits of `dtype` as float32 (exact for f32, f16, bf16 and f8)."""
    if dtype is DType.BF16:
        return bf16_to_float32(stored.view(np.uint16))
    if dtype is DType.F8:
        return _F8[stored.view(np.uint8)]
    return stored.astype(np.float32)


def from_float32(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.generic]:
    """float32 values as stored bits of `dtype`, rounded to nearest even."""
    if dtype is DType.BF16:
        return float32_to_bf16(values)
    if dtype is DType.F8:
        size = np.abs(round_to_f8(values))
        codes = np.searchsorted(_F8[:_F8_NAN], size).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)
        return np.where(np.isnan(values), np.uint8(_F8_NAN), codes)
    return values.astype(dtype.storage)
