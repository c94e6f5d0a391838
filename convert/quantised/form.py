"""The one form that quantised weights have in a Checkpoint, whatever format they came from.

    W[n, k] = (v - zero[n, j]) * scale[n, j] (+ offset[n, j]) (* or / factor[n]) (* columns[k])        j = k // group

v is the code c[n, k], or table[c[n, k]]. Where columns are reordered, W's column k is column order[k] of that. Codes
are the stored integers: nothing is rounded again. Codes of 4 bits lie two to a byte, in rows of an even number of
columns.

Scales and offsets may be integers of one byte, times units that neighbouring groups share: scale_unit[n, u] is what the
integers of the u-th so many groups count. The product is exact in float32.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.convert.quantised.bits import Bytes, pack_nibbles
from ingot.dtypes import DType, count_nonfinite, to_float32
from ingot.errors import CheckpointError

BLOCK = 1 << 20  # codes that are in memory at a time
FLOATS = "floats"  # the only piece of a weight that has no codes
_UNIT = "_unit"

Bits = npt.NDArray[np.generic]
Rows = Callable[[int, int], npt.NDArray[np.uint8] | npt.NDArray[np.int8]]
"""(begin, end) → codes [end - begin, columns], a byte each"""


class Code(enum.Enum):
    """What a code is: unsigned or signed, of 4 or 8 bits, or a float of 8 bits (E4M3FN). NONE: there are floats in
    place of codes."""

    U4 = "u4"
    I4 = "i4"
    U8 = "u8"
    I8 = "i8"
    F8 = "f8"
    NONE = "floats"

    @property
    def packed(self) -> bool:
        """Whether two lie in a byte."""
        return self in (Code.U4, Code.I4)

    @property
    def byte(self) -> DType:
        """The type of one code in a byte of its own."""
        return {"u": DType.U8, "i": DType.I8, "f": DType.F8}[self.value[0]]

    @classmethod
    def integers(cls, bits: int, columns: int, *, signed: bool) -> "Code":
        """The smallest that holds them; rows of an odd number of columns are not packed."""
        size = 4 if bits <= 4 and columns % 2 == 0 else 8
        return cls(f"{'i' if signed else 'u'}{size}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One of the tensors that make a quantised weight.

    read    yields its stored bits, flat, block by block
    memory  bytes that are held meanwhile, beyond a few blocks
    where   the tensor that it is made of, for errors
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Iterator[Bits]]
    memory: int = 0
    where: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """A quantised weight [rows, columns], or a stack of them.

    format  what it came from, for people
    file    where its codes lie
    group   columns that share a scale
    pieces  codes and scale; where the format has them zero, offset, factor, columns, order, and units of scales and
            offsets; of floats these alone; of members nothing
    members weights that lie one below the other, but are stored one by one: each has an order or scales of its
            columns, or a form of its own
    table   16 values that codes stand for; empty where codes are values
    divides whether the factor divides
    """

    name: str
    format: str
    file: Path
    shape: tuple[int, ...]
    code: Code
    group: int
    pieces: Mapping[str, Piece]
    table: tuple[float, ...] = ()
    divides: bool = False
    members: tuple["Quantised", ...] = ()

    @property
    def dtype(self) -> DType:
        """What it is computed as."""
        return DType.F32

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def kind(self) -> str:
        """For people, such as "awq u4g128 with zero"."""
        if self.members:
            return ", ".join(dict.fromkeys(each.kind for each in self.members))
        if self.code is Code.NONE:
            return self.pieces[FLOATS].dtype.value
        grain = "" if self.group == self.shape[-1] else f"g{self.group}"
        more = [name for name in self.pieces if name not in ("codes", "scale") and not name.endswith(_UNIT)]
        return f"{self.format} {self.code.value}{grain}" + (f" with {', '.join(more)}" if more else "")


def piece_name(weight: str, kind: str) -> str:
    """What a piece is called in the Checkpoint."""
    return f"{weight}/{kind}"


def unit_of(kind: str) -> str:
    """The kind of the piece that has the units of scales or offsets."""
    return f"{kind}{_UNIT}"


def code_piece(code: Code, shape: tuple[int, int], load: Callable[[], Rows], memory: int = 0) -> Piece:
    """Codes of a weight [rows, columns]. load: makes ready what `Rows` reads from."""
    rows, columns = shape

    def read() -> Iterator[Bits]:
        found = load()
        step = max(1, BLOCK // max(columns, 1))
        for begin in range(0, rows, step):
            block: Bytes = np.ascontiguousarray(found(begin, min(begin + step, rows))).view(np.uint8)
            yield (pack_nibbles(block) if code.packed else block).reshape(-1)

    if code.packed:
        return Piece(dtype=DType.U8, shape=(rows, columns // 2), read=read, memory=memory)
    return Piece(dtype=code.byte, shape=shape, read=read, memory=memory)


def value_piece(
    dtype: DType, shape: tuple[int, ...], load: Callable[[], Bits], where: str, *, repeats: int = 1
) -> Piece:
    """Scales and the like, all in memory. repeats: how often the rows that `load` gives follow one another.

    Raises CheckpointError while it is read, where one is NaN or infinite.
    """
    made = (shape[0] // repeats, *shape[1:])

    def read() -> Iterator[Bits]:
        values = np.ascontiguousarray(load())
        assert values.shape == made, f"{where}: {values.shape} in place of {made}"
        _require_finite(values, dtype, where)
        for _ in range(repeats):
            yield values.reshape(-1)

    return Piece(dtype=dtype, shape=shape, read=read, memory=math.prod(made) * dtype.itemsize * 2, where=where)


def streamed_piece(dtype: DType, shape: tuple[int, int], load: Callable[[int, int], Bits], where: str) -> Piece:
    """Scales and the like of a weight too large to hold them all. load: (begin, end) → rows [end - begin, groups].

    Raises CheckpointError while it is read, as `value_piece`.
    """
    rows, groups = shape

    def read() -> Iterator[Bits]:
        step = max(1, BLOCK // 16 // max(groups, 1))  # of a format whose groups have 16 columns
        for begin in range(0, rows, step):
            values = np.ascontiguousarray(load(begin, min(begin + step, rows)))
            _require_finite(values, dtype, where)
            yield values.reshape(-1)

    return Piece(dtype=dtype, shape=shape, read=read, where=where)


def _require_finite(values: Bits, dtype: DType, where: str) -> None:
    if bad := count_nonfinite(values, dtype):
        raise CheckpointError(
            "a quantised weight has scales that are NaN or infinite",
            where=where,
            got=f"{bad:,} of {values.size:,}",
            hint="download the model again; the file may have been damaged when it was made",
        )


def without_units(weight: Quantised) -> Quantised:
    """The same weight, whose scales and offsets are float32 numbers."""
    pieces = {
        name: _times(piece, weight.pieces[unit_of(name)]) if unit_of(name) in weight.pieces else piece
        for name, piece in weight.pieces.items()
        if not name.endswith(_UNIT)
    }
    return dataclasses.replace(weight, pieces=pieces)


def _times(integers: Piece, units: Piece) -> Piece:
    rows, groups = integers.shape

    def read() -> Iterator[Bits]:
        blocks, factors = units.read(), np.empty((0, units.shape[1]), np.float32)
        for block in integers.read():
            own = to_float32(block.view(integers.dtype.storage), integers.dtype).reshape(-1, groups)
            while len(factors) < len(own):
                more = to_float32(next(blocks).view(units.dtype.storage), units.dtype)
                factors = np.concatenate([factors, more.reshape(-1, units.shape[1])])
            now, factors = factors[: len(own)], factors[len(own) :]
            yield (own * np.repeat(now, groups // units.shape[1], axis=1)).reshape(-1)

    return Piece(dtype=DType.F32, shape=(rows, groups), read=read, memory=integers.memory + units.memory)


def same_form(first: Quantised, other: Quantised) -> bool:
    """Whether two weights one below the other are one."""
    mine, theirs = (
        (each.code, each.group, each.table, each.divides, [(n, each.pieces[n].dtype) for n in each.pieces])
        for each in (first, other)
    )
    return mine == theirs


def float_rows(name: str, file: Path, piece: Piece) -> Quantised:
    """Floats that become a part of a quantised weight."""
    pieces = {FLOATS: piece}
    return Quantised(name=name, format="", file=file, shape=piece.shape, code=Code.NONE, group=1, pieces=pieces)


def stacked(parts: Sequence[Quantised], shape: tuple[int, ...], name: str) -> Quantised:
    """Weights one below the other as one of `shape`."""
    first = parts[0]
    by_itself = any(not {"order", "columns"}.isdisjoint(part.pieces) or not same_form(first, part) for part in parts)
    if len(parts) > 1 and by_itself:
        path = name.removesuffix("/weight")
        members = [dataclasses.replace(part, name=f"{path}/{number}/weight") for number, part in enumerate(parts)]
        return dataclasses.replace(first, name=name, shape=shape, pieces={}, members=tuple(members))
    names = list(first.pieces)
    pieces = (
        {each: _joined([part.pieces[each] for part in parts]) for each in names} if len(parts) > 1 else first.pieces
    )
    return dataclasses.replace(first, name=name, shape=shape, pieces=pieces)


def unpaired(weight: Quantised, heads: int) -> Quantised:
    """The weight whose rows lie as pairs in each head, [heads, n, 2, columns], in halves: [heads, 2, n, columns]."""
    pieces = {
        name: piece if name in ("columns", "order") else _unpaired(piece, weight.rows // heads)
        for name, piece in weight.pieces.items()
    }
    return dataclasses.replace(weight, pieces=pieces)


def _unpaired(piece: Piece, rows: int) -> Piece:
    """rows: of a head, which is in memory."""
    size = rows * math.prod(piece.shape[1:])

    def read() -> Iterator[Bits]:
        rest: Bits = np.empty(0, piece.dtype.storage)
        for block in piece.read():
            held = np.concatenate([rest, block.view(piece.dtype.storage).reshape(-1)])
            whole = len(held) // size * size
            heads = held[:whole].reshape(-1, rows // 2, 2, math.prod(piece.shape[1:]))
            yield heads.swapaxes(1, 2).reshape(-1)
            rest = held[whole:]
        assert not rest.size, "heads are whole"

    return dataclasses.replace(piece, read=read, memory=piece.memory + 2 * size * piece.dtype.itemsize)


def _joined(pieces: Sequence[Piece]) -> Piece:
    first = pieces[0]
    return Piece(
        dtype=first.dtype,
        shape=(sum(piece.shape[0] for piece in pieces), *first.shape[1:]),
        read=lambda: itertools.chain.from_iterable(piece.read() for piece in pieces),
        memory=max(piece.memory for piece in pieces),
    )
