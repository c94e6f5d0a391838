"""Weights that become one but are stored in different forms, such as experts of 4 bits beside others of 8.

Their codes become whole bytes, or signed codes of four bits where these hold all values, and a scale of many columns
becomes several equal ones. Where values of a table are fractions, such as 3.125, the bytes count eighths of them. No
value changes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.bits import nibbles, pack_nibbles, signed_bytes
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, same_form, without_units
from ingot.dtypes import DType, to_float32

Array = npt.NDArray[Any]
_LARGEST = 127
_MOST_PARTS = 8  # of the number 1 that values of a table may be divided into


def made_alike(parts: Sequence[Quantised]) -> list[Quantised] | None:
    """The same weights in one form; None where there is none for all of them."""
    parts = _with_factors(parts)
    if all(same_form(parts[0], part) for part in parts):
        return parts
    parts = [without_units(part) for part in parts]
    group = math.gcd(*(part.group for part in parts))
    zeros = {"zero" in part.pieces for part in parts}
    known = {"codes", "scale", "factor", "zero" if zeros == {True} else "offset"}
    whole = all(_parts_of_one(part.table) for part in parts)
    fits = all(part.shape[-1] % group == 0 and not part.pieces.keys() - known for part in parts)
    unsigned = {part.code in (Code.U4, Code.U8) and not part.table for part in parts}
    if not (whole and fits) or any(part.code is Code.F8 or part.divides for part in parts):
        return None
    if zeros == {True} and (unsigned != {True} or any(part.pieces["zero"].dtype is DType.F32 for part in parts)):
        return None
    if zeros != {True} and any(part.code is Code.U8 for part in parts):
        return None  # such bytes are not all signed ones
    offsets = any("offset" in part.pieces for part in parts)
    few = not offsets and all(_fit_four_bits(part) for part in parts)
    code = Code.U8 if zeros == {True} else Code.I4 if few else Code.I8
    return [_made(part, code, group, offsets=offsets) for part in parts]


def _fit_four_bits(part: Quantised) -> bool:
    """Whether signed codes of four bits hold what a weight's codes stand for."""
    whole = part.code is Code.U4 and bool(part.table) and _parts_of_one(part.table) == 1
    return part.code is Code.I4 or (whole and -8 <= min(part.table) <= max(part.table) <= 7)


def _parts_of_one(table: tuple[float, ...]) -> int:
    """The power of two that makes all values of a table whole numbers of a byte; 0 where none does."""
    for count in (1, 2, 4, _MOST_PARTS):
        if all(float(value * count).is_integer() and abs(value * count) <= _LARGEST for value in table):
            return count
    return 0


def _with_factors(parts: Sequence[Quantised]) -> list[Quantised]:
    """Those without a factor of rows get one of 1 where others have one."""
    if not any("factor" in part.pieces for part in parts) or any(part.divides for part in parts):
        return list(parts)
    return [
        part
        if "factor" in part.pieces
        else dataclasses.replace(part, pieces={**part.pieces, "factor": _constant((part.rows, 1), 1)})
        for part in parts
    ]


def _made(part: Quantised, code: Code, group: int, *, offsets: bool) -> Quantised:
    rows, columns = part.rows, part.shape[-1]
    times, shape = part.group // group, (rows, columns // group)
    parts_of_one = _parts_of_one(part.table)
    table = (np.array(part.table) * parts_of_one).astype(np.int8)

    def values(stored: Array) -> Array:
        """Codes as they are read → bytes."""
        found = nibbles(stored) if part.code.packed else stored
        if part.table:
            found = table[found].view(np.uint8)
        elif part.code is Code.I4:
            found = signed_bytes(found)
        return pack_nibbles(found) if code.packed else found

    def spread(kind: str) -> Piece:
        """Numbers of groups for the parts of these."""
        piece = part.pieces[kind]

        def repeated(stored: Array) -> Array:
            found = stored if kind == "zero" else to_float32(stored, piece.dtype)
            if kind == "scale":
                found = found / np.float32(parts_of_one)
            of_rows = np.repeat(found.reshape(-1, piece.shape[1]), times, axis=1)
            return of_rows[:, : shape[1]].reshape(-1)  # the last group may be smaller

        return _changed(piece, DType.U8 if kind == "zero" else DType.F32, shape, repeated)

    stored, width = (DType.U8, columns // 2) if code.packed else (code.byte, columns)
    pieces = {"codes": _changed(part.pieces["codes"], stored, (rows, width), values), "scale": spread("scale")}
    if "zero" in part.pieces:
        pieces["zero"] = spread("zero")
    if "offset" in part.pieces:
        pieces["offset"] = spread("offset")
    elif offsets:
        pieces["offset"] = _constant(shape, 0)
    if "factor" in part.pieces:
        pieces["factor"] = part.pieces["factor"]
    return dataclasses.replace(part, code=code, group=group, pieces=pieces, table=())


def _changed(piece: Piece, dtype: DType, shape: tuple[int, ...], change: Callable[[Array], Array]) -> Piece:
    def read() -> Iterator[Bits]:
        for block in piece.read():
            flat = block.view(piece.dtype.storage).reshape(-1)
            yield change(flat.view(np.uint8) if dtype is not DType.F32 else flat).view(dtype.storage)

    return Piece(dtype=dtype, shape=shape, read=read, memory=piece.memory)


def _constant(shape: tuple[int, int], value: float) -> Piece:
    row = np.full(shape[1], value, np.float32)
    return Piece(dtype=DType.F32, shape=shape, read=lambda: (row for _ in range(shape[0])))
