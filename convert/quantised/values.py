"""Weights that are stored as codes, but whose rows a family makes of columns: their values, in float32.

A scale belongs to neighbours in a row. Where columns become rows there are none, so that no codes can be kept; float32
holds the values of the codes as the file's own decoder makes them.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.bits import nibbles, signed_bytes
from ingot.convert.quantised.form import Code, Quantised, without_units
from ingot.convert.weights import Concat, Expr, Transpose, sources
from ingot.dtypes import DType, to_float32
from ingot.errors import UnsupportedModelError
from ingot.tensor_file import StoredTensor, read_rows

Float32 = npt.NDArray[np.float32]
_KNOWN = {"codes", "scale", "offset"}  # what blocks of GGUF have


def mixes_columns(expr: Expr) -> bool:
    """Whether rows of an expression are made of columns, or of several weights side by side."""
    if isinstance(expr, Transpose) or (isinstance(expr, Concat) and expr.axis != 0):
        return True
    inner = getattr(expr, "of", ())
    return any(map(mixes_columns, inner if isinstance(inner, tuple) else (inner,)))


def float_values(weight: StoredTensor | Quantised) -> Float32:
    """All values of a weight, in its shape."""
    if isinstance(weight, StoredTensor):
        return to_float32(read_rows(weight), weight.dtype).reshape(weight.shape)
    weight = without_units(weight)
    if weight.pieces.keys() - _KNOWN:
        raise UnsupportedModelError(
            "this family stores a weight in another order, and a weight of this format cannot be reordered",
            where=f"{weight.file}: {weight.name}",
            expected="blocks of GGUF, or floats",
            got=weight.kind,
            hint="convert the model's original weights",
        )
    values = _codes(weight).reshape(weight.rows, -1, weight.group)
    values *= _numbers(weight, "scale")[:, :, None]
    if "offset" in weight.pieces:
        values += _numbers(weight, "offset")[:, :, None]
    return values.reshape(weight.shape)


def _codes(weight: Quantised) -> Float32:
    """What codes stand for."""
    stored = np.concatenate(list(weight.pieces["codes"].read())).view(np.uint8)
    codes = nibbles(stored) if weight.code.packed else stored
    if weight.table:
        return np.array(weight.table, np.float32)[codes]
    codes = signed_bytes(codes) if weight.code is Code.I4 else codes
    return codes.view(np.int8 if weight.code in (Code.I4, Code.I8) else np.uint8).astype(np.float32)


def _numbers(weight: Quantised, kind: str) -> Float32:
    piece = weight.pieces[kind]
    stored = np.concatenate([each.reshape(-1) for each in piece.read()])
    return to_float32(stored, piece.dtype).reshape(piece.shape)


def values_memory(expr: Expr, tensors: Mapping[str, StoredTensor | Quantised]) -> int:
    """Bytes that are held while the values of an expression are made: codes, values, and both in another order."""
    return 4 * DType.F32.itemsize * sum(math.prod(tensors[name].shape) for name in sources(expr))
