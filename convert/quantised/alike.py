"""Weights that become one but are stored in different forms, such as experts of 4 bits beside others of 8.

Their codes become whole bytes, and a scale of many columns becomes several equal ones. No value changes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.bits import nibbles, signed_bytes
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, without_units
from ingot.dtypes import DType, to_float32

Array = npt.NDArray[Any]
_LARGEST = 127


def made_alike(parts: Sequence[Quantised]) -> list[Quantised] | None:
    """The same weights in one form; None where there is none for all of them."""
    parts = [without_units(part) for part in parts]
    group = math.gcd(*(part.group for part in parts))
    zeros = {"zero" in part.pieces for part in parts}
    known = {"codes", "scale", "zero"} if zeros == {True} else {"codes", "scale", "offset"}
    whole = all(float(value).is_integer() and abs(value) <= _LARGEST for part in parts for value in part.table)
    fits = all(part.shape[-1] % group == 0 and not part.pieces.keys() - known for part in parts)
    unsigned = {part.code in (Code.U4, Code.U8) and not part.table for part in parts}
    if not (whole and fits) or any(part.code is Code.F8 or part.divides for part in parts):
        return None
    if zeros == {True} and (unsigned != {True} or any(part.pieces["zero"].dtype is DType.F32 for part in parts)):
        return None
    if zeros != {True} and any(part.code is Code.U8 for part in parts):
        return None  # such bytes are not all signed ones
    code = Code.U8 if zeros == {True} else Code.I8
    offsets = any("offset" in part.pieces for part in parts)
    return [_made(part, code, group, offsets=offsets) for part in parts]


def _made(part: Quantised, code: Code, group: int, *, offsets: bool) -> Quantised:
    rows, columns = part.rows, part.shape[-1]
    times, shape = part.group // group, (rows, columns // group)
    table = np.array(part.table, np.int8)

    def values(stored: Array) -> Array:
        """Codes as they are read → bytes."""
        found = nibbles(stored) if part.code.packed else stored
        if part.table:
            return table[found].view(np.uint8)
        return signed_bytes(found) if part.code is Code.I4 else found

    def spread(kind: str) -> Piece:
        """Numbers of groups for the parts of these."""
        piece = part.pieces[kind]

        def repeated(stored: Array) -> Array:
            found = stored if kind == "zero" else to_float32(stored, piece.dtype)
            of_rows = np.repeat(found.reshape(-1, piece.shape[1]), times, axis=1)
            return of_rows[:, : shape[1]].reshape(-1)  # the last group may be smaller

        return _changed(piece, DType.U8 if kind == "zero" else DType.F32, shape, repeated)

    pieces = {"codes": _changed(part.pieces["codes"], code.byte, (rows, columns), values), "scale": spread("scale")}
    if "zero" in part.pieces:
        pieces["zero"] = spread("zero")
    if "offset" in part.pieces:
        pieces["offset"] = spread("offset")
    elif offsets:
        pieces["offset"] = _zeros(shape)
    return dataclasses.replace(part, code=code, group=group, pieces=pieces, table=())


def _changed(piece: Piece, dtype: DType, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Piece:
    def read() -> Iterator[Bits]:
        for block in piece.read():
            flat = block.view(piece.dtype.storage).reshape(-1)
            yield change(flat.view(np.uint8) if dtype is not DType.F32 else flat).view(dtype.storage)

    return Piece(dtype=dtype, shape=shape, read=read, memory=piece.memory)


def _zeros(shape: tuple[int, int]) -> Piece:
    return Piece(dtype=DType.F32, shape=shape, read=lambda: (np.zeros(shape[1], np.float32) for _ in range(shape[0])))
