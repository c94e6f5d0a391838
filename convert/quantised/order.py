"""Quantised weights whose rows, or groups of columns, lie in another order."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.form import Bits, Piece, Quantised, unit_of, without_units
from ingot.errors import UnsupportedModelError

_OF_COLUMNS = ("columns", "order")  # pieces that have no rows


def with_rows(weight: Quantised, rows: npt.NDArray[np.int64]) -> Quantised:
    """The weight made of these of its rows."""
    pieces = {
        name: piece if name in _OF_COLUMNS else _made(piece, (len(rows), *piece.shape[1:]), lambda bits: bits[rows])
        for name, piece in weight.pieces.items()
    }
    return dataclasses.replace(weight, shape=(len(rows), weight.shape[1]), pieces=pieces)


def with_columns_swapped(weight: Quantised, outer: int, inner: int) -> Quantised:
    """The weight whose columns lie as [outer, inner, n], as [inner, outer, n].

    Raises UnsupportedModelError where a scale belongs to columns of several n.
    """
    size = weight.shape[1] // (outer * inner)
    units = weight.pieces.get(unit_of("scale"))
    if units is not None and size % (weight.shape[1] // units.shape[1]):
        weight = without_units(weight)
    if size % weight.group or set(weight.pieces) & set(_OF_COLUMNS):
        raise UnsupportedModelError(
            "a quantised weight cannot be reordered: its columns share scales across heads",
            where=weight.name,
            expected=f"groups of columns that divide {size}",
            got=f"groups of {weight.group}",
            hint="convert the model's original weights",
        )

    def swapped(bits: Bits) -> Bits:
        return bits.reshape(len(bits), outer, inner, -1).swapaxes(1, 2).reshape(bits.shape)

    pieces = {
        name: _made(piece, piece.shape, swapped) if len(piece.shape) == 2 and piece.shape[1] > 1 else piece
        for name, piece in weight.pieces.items()
    }
    return dataclasses.replace(weight, pieces=pieces)


def _made(piece: Piece, shape: tuple[int, ...], change: Callable[[Bits], Bits]) -> Piece:
    """A piece of the given shape that is made in memory."""

    def read() -> Iterator[Bits]:
        bits = np.concatenate([block.view(piece.dtype.storage).reshape(-1) for block in piece.read()])
        yield np.ascontiguousarray(change(bits.reshape(piece.shape))).reshape(-1)

    memory = 2 * piece.dtype.itemsize * int(np.prod(piece.shape))
    return dataclasses.replace(piece, shape=shape, read=read, memory=piece.memory + memory)
