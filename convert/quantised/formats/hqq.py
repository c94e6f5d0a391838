"""HQQ: groups of the flat weight (axis 1) or of its columns (axis 0), with zero points that need not be whole.

    W_q U8 (3 bits: I32), scale and zero, and scalars as tensors: nbits, axis, group_size, shape
    W = (q - zero) * scale, of the weight reshaped to [NK/g, g] (axis 1) or [g, NK/g] (axis 0)

W_q holds equal parts of the rows of that shape, the first part in the highest bits.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, Rows, value_piece
from ingot.convert.quantised.module import FLOATS, Format, Module
from ingot.dtypes import DType, to_float32
from ingot.errors import CheckpointError, UnsupportedModelError
from ingot.tensor_file import read_rows

_INTEGERS = ("I64", "I32", "U8")
_BITS = (1, 2, 3, 4, 8)
_IDLE = (
    "group_size",
    "packing",
    "round_zero",
    "optimize",
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "offload_meta",
    "quant_scale",
    "quant_zero",
    "stores_quant_config",
    "unpack_view_dtype",
)


def read(module: Module) -> Quantised:
    bits, axis = _scalar(module, "nbits"), _scalar(module, "axis")
    n, k = _shape(module)
    if bits not in _BITS or axis not in (0, 1):
        raise UnsupportedModelError(
            "HQQ with this packing is not supported",
            where=module.where(),
            expected=f"{', '.join(map(str, _BITS))} bits along axis 0 or 1",
            got=f"{bits} bits along axis {axis}",
        )
    if module.has("view_as_float") and _scalar(module, "view_as_float"):
        raise UnsupportedModelError(
            "HQQ with codes stored as floats is not supported", where=module.where(), hint="save them as integers"
        )
    codes = module.part("W_q", ("I32",) if bits == 3 else ("U8",))
    words, groups = math.prod(codes.shape), math.prod(module.part("scale", FLOATS).shape)
    per = 10 if bits == 3 else 8 // bits
    size = n * k // max(groups, 1)
    if groups < 1 or n * k % groups or not n * k <= words * per < n * k + per * max(size, groups):
        raise CheckpointError(
            "the codes and scales of a quantised weight do not fit its shape",
            where=f"{codes.file}: {codes.name}",
            expected=f"[{n}, {k}] of {bits} bits",
            got=f"{words * per:,} codes and {groups:,} scales",
        )
    module.part("zero", FLOATS)
    if math.prod(module.parts["zero"].shape) != groups:
        module.require("zero", module.parts["scale"].shape)

    def load() -> Rows:
        held: npt.NDArray[Any] = read_rows(codes).reshape(-1)

        def rows(begin: int, end: int) -> Bytes:
            places = np.arange(begin * k, end * k)
            shifts = bits * (per - 1 - places // words)
            found: Bytes = (held[places % words] >> shifts & ((1 << bits) - 1)).astype(np.uint8)
            return found.reshape(end - begin, k)

        return rows

    pieces, group = _along_columns(module, n, k, size) if axis == 0 else _along_rows(module, n, k, size)
    code = Code.integers(bits, k, signed=False)
    return module.made((n, k), code, group, load, pieces, memory=codes.nbytes, codes="W_q")


def _along_rows(module: Module, n: int, k: int, size: int) -> tuple[dict[str, Piece | None], int]:
    """Scales and zero points of groups of the flat weight."""
    group = math.gcd(k, size)
    shape = (n, k // group)

    def piece(part: str) -> Piece:
        def load() -> Bits:
            owners = np.arange(n * k // group, dtype=np.int64) * group // size
            return _values(module, part)[owners].reshape(shape)

        return value_piece(DType.F32, shape, load, module.where(part))

    return {"scale": piece("scale"), "zero": piece("zero")}, group


def _along_columns(module: Module, n: int, k: int, size: int) -> tuple[dict[str, Piece | None], int]:
    """Scales and zero points of every column, which come again every n / size rows."""
    if n % size:
        raise UnsupportedModelError(
            "HQQ with groups along axis 0 that do not divide the rows is not supported",
            where=module.where(),
            got=f"{n} rows, groups of {size}",
        )

    def piece(part: str) -> Piece:
        def load() -> Bits:
            return _values(module, part).reshape(n // size, k)

        return value_piece(DType.F32, (n, k), load, module.where(part), repeats=size)

    return {"scale": piece("scale"), "zero": piece("zero")}, 1


def _values(module: Module, part: str) -> Bits:
    tensor = module.parts[part]
    return to_float32(read_rows(tensor).reshape(-1), tensor.dtype)


def _scalar(module: Module, part: str) -> int:
    tensor = module.part(part, _INTEGERS)
    if math.prod(tensor.shape) != 1:
        module.require(part, ())
    return int(read_rows(tensor).reshape(-1)[0])


def _shape(module: Module) -> tuple[int, int]:
    tensor = module.part("shape", _INTEGERS, 1)
    module.require("shape", (2,))
    n, k = (int(size) for size in read_rows(tensor))
    if not (0 < n < 1 << 31 and 0 < k < 1 << 31):
        raise CheckpointError("a quantised weight has no usable shape", where=tensor.name, got=f"[{n}, {k}]")
    return n, k


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("skip_modules") if settings.has("skip_modules") else ()


FORMAT = Format(
    names=("hqq",),
    marks=("W_q",),
    parts=("W_q", "scale", "zero", "nbits", "axis", "shape", "view_as_float", *_IDLE),
    read=read,
    skipped=_skipped,
    idle=_IDLE,
)
