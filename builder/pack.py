"""Where packed weights lie in the weights section, and their bytes, block by block in the order of the file.

0            slice_ 0 of every product, in order of use
n * 2 MiB    slice_ 1 of every product, ...          which is read by a part of the threads
...          then tables, norm weights and biases ("row")

How many slices there are follows from the model alone: every machine builds the same bytes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import WeightReader, is_copy, matrix_shape
from ingot.builder.kept_rows import kept_bytes, kept_rows
from ingot.builder.parallel_map import parallel_map
from ingot.builder.quantise import quantise
from ingot.dtypes import DType, Precision, count_nonfinite, from_float32
from ingot.engine import SECTION_ALIGNMENT, aligned
from ingot.plan import ALIGNMENT, Plan, Weight, WeightSlice
from ingot.plugins.compressed import fits
from ingot.plugins.layouts import (
    interleave_gated,
    num_panels,
    pack_panels,
    pack_quantised,
    pack_table,
    panel_bytes,
    panel_layout,
    row_bytes,
    row_layout,
)
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.target import Constant
from ingot.plugins.weight_rows import WeightRows
from ingot.weight_formats import KEPT, PANEL

GATED = ".gated"
CODE_ALIGNMENT = 4096  # constants may be mapped by themselves
SLICE_BYTES = 32 << 20  # of products, that a slice_ holds at least
MOST_SLICES = 8  # as many memory nodes find a part for their threads alone
BLOCK_BYTES = 4 << 20  # float32 bytes of weight in memory at a time

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightUse:
    """A weight as a step wants it.

    panels  packed for a product; else a table or vector
    gated   gate and up rows interleaved
    group   columns that share a multiplier or a scale
    shape   of experts: [experts, N, K], packed one by one
    made    quantised as w8, then made of that: rows → these rows
    """

    name: str
    tensor: gs.Tensor
    dtype: DType
    shape: tuple[int, ...]
    panels: bool = False
    gated: bool = False
    group: int = 0
    made: Callable[[QuantisedRows], QuantisedRows] | None = None

    @property
    def precision(self) -> Precision:
        return Precision(dtype=self.dtype, group=self.group)

    @property
    def layout(self) -> str:
        """Name of the layout, see `plugins/layouts.py`."""
        if not self.panels:
            return row_layout(self.dtype)
        return panel_layout(self.dtype, self.group) + (GATED if self.gated else "")

    @property
    def units(self) -> int:
        """Panels of a product, rows of anything else; of one expert."""
        rows = self.shape[-2] if self.experts > 1 else self.shape[0]
        return num_panels(self.shape[-2], gated=self.gated) if self.panels else rows

    @property
    def experts(self) -> int:
        """1 for every other weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def nbytes(self) -> int:
        return self.experts * self.units * self.unit_bytes

    @property
    def unit_bytes(self) -> int:
        """Bytes of one panel or row."""
        cols = matrix_shape(self.tensor)[1]
        return panel_bytes(cols, self.dtype, self.group) if self.panels else row_bytes(cols, self.dtype)

    @property
    def unit_values(self) -> int:
        """Numbers in one panel or row."""
        return matrix_shape(self.tensor)[1] * (PANEL if self.panels else 1)


def slice_count(uses: Sequence[WeightUse]) -> int:
    """As many as the products fill: a power of two, for so is the number of nodes of most machines."""
    filled = sum(use.nbytes for use in uses if use.panels) // SLICE_BYTES
    return min(MOST_SLICES, 1 << max(0, filled.bit_length() - 1))


def place_weights(uses: Sequence[WeightUse], slices: int) -> tuple[list[Weight], int]:
    """(weights in the order of `uses`, bytes of the section)."""
    pieces: dict[str, list[WeightSlice]] = {use.name: [] for use in uses}
    position = 0
    for slice_ in range(slices):
        position = aligned(position, SECTION_ALIGNMENT)
        for use in uses:
            if not use.panels:
                continue
            step = 2 if use.gated else 1  # gate and up panels of the same columns stay together
            begin, end = (use.units // step * i // slices * step for i in (slice_, slice_ + 1))
            if begin < end:
                position = aligned(position, ALIGNMENT)
                pieces[use.name].append(WeightSlice(begin=begin, end=end, offset=position))
                position += use.experts * (end - begin) * use.unit_bytes
    for use in uses:
        if not use.panels:
            position = aligned(position, ALIGNMENT)
            pieces[use.name].append(WeightSlice(begin=0, end=use.units, offset=position))
            position += use.nbytes
    weights = [
        Weight(
            name=use.name,
            dtype=use.dtype,
            shape=use.shape,
            layout=use.layout,
            nbytes=use.nbytes,
            pieces=tuple(pieces[use.name]),
        )
        for use in uses
    ]
    return weights, position


def add_constants(plans: Sequence[Plan], constants: Sequence[Sequence[Constant]]) -> list[Plan]:
    """Plans of one weights section, each with its constants as more weights, of bytes, behind everything else; those of
    equal bytes lie there once."""
    (position,) = {plan.weight_bytes for plan in plans}
    weights = [list(plan.weights) for plan in plans]
    places: dict[tuple[str, bytes], int] = {}
    for own, each in zip(weights, constants, strict=True):
        for constant in each:
            what, size = (constant.layout, constant.data), len(constant.data)
            if what not in places:
                places[what] = aligned(position, CODE_ALIGNMENT)
                position = places[what] + size
            piece = WeightSlice(begin=0, end=size, offset=places[what])
            own.append(
                Weight(
                    name=constant.name,
                    dtype=DType.I8,
                    shape=(size,),
                    layout=constant.layout,
                    nbytes=size,
                    pieces=(piece,),
                )
            )
    return [
        dataclasses.replace(plan, weights=tuple(own), weight_bytes=position)
        for plan, own in zip(plans, weights, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Units [begin, end) of a weight (of one of its experts), whose bytes begin at `offset` of the section."""

    use: WeightUse
    expert: int
    begin: int
    end: int
    offset: int


@dataclasses.dataclass(slots=True)
class _Squares:
    """Sums over the values of a weight: their squares, and those of what packing changes."""

    values: float = 0.0
    changes: float = 0.0


class Packer:
    """Reads, rounds or quantises, and packs. After `blocks` is exhausted, `nonfinite` counts NaN and infinite values
    by weight, and `errors` says what was lost of each quantised one: root of the squared changes over that of the
    squared values.

    threads  that work on one block each: numpy lets go of the interpreter while it computes
    """

    def __init__(
        self, reader: WeightReader, uses: Sequence[WeightUse], weights: Sequence[Weight], threads: int = 1
    ) -> None:
        self._reader, self._threads = reader, threads
        self._uses = {use.name: use for use in uses}
        own = [weight for weight in weights if weight.name in self._uses]
        self._pieces = sorted(
            ((piece, weight.name) for weight in own for piece in weight.pieces), key=lambda each: each[0].offset
        )
        self.nonfinite: dict[str, int] = {}
        self._squares: dict[str, _Squares] = {}

    @property
    def errors(self) -> dict[str, float]:
        return {
            name: float(f"{math.sqrt(each.changes / each.values) if each.values else 0:.3g}")
            for name, each in self._squares.items()
        }

    def blocks(self, progress: Progress) -> Iterator[tuple[int, memoryview]]:
        """(offset in the section, bytes), ascending. progress: called with the bytes of each block."""
        for block, packed, bad, squares in parallel_map(self._packed, self._work(), self._threads):
            if bad:
                self.nonfinite[block.use.name] = self.nonfinite.get(block.use.name, 0) + bad
            if squares is not None:
                total = self._squares.setdefault(block.use.name, _Squares())
                total.values += squares.values
                total.changes += squares.changes
            data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8).data
            progress(len(data))
            yield block.offset, data

    def _work(self) -> Iterator[_Block]:
        for piece, name in self._pieces:
            use = self._uses[name]
            step, offset = _block_units(use), piece.offset
            for expert, begin in itertools.product(range(use.experts), range(piece.begin, piece.end, step)):
                end = min(begin + step, piece.end)
                yield _Block(use=use, expert=expert, begin=begin, end=end, offset=offset)
                offset += (end - begin) * use.unit_bytes

    def _packed(self, block: _Block) -> tuple[_Block, npt.NDArray[np.generic], int, _Squares | None]:
        """(the block, its bytes, how many of its values are not finite, what was lost of a quantised one)"""
        use = block.use
        if is_copy(use.tensor, use.dtype.numbers):
            stored = np.concatenate([self._reader.read_bits(use.tensor, *each) for each in _ranges(block)])
            return block, _pack_stored(use, stored), count_nonfinite(stored, use.dtype.numbers), None
        values = np.concatenate([self._reader.read_rows(use.tensor, *each) for each in _ranges(block)])
        bad = int(values.size - np.count_nonzero(np.isfinite(values)))
        if not use.dtype.is_quantised:
            return block, _pack_stored(use, from_float32(values, use.dtype.numbers)), bad, None
        if use.made is not None:
            rows: WeightRows = use.made(quantise(values, Precision(dtype=DType.W8)))
            return block, pack_quantised(rows, gated=use.gated), bad, None
        if str(use.precision) in KEPT:
            rows = kept_rows(self._reader, use.tensor, _ranges(block), use.precision)
        else:
            rows = self._quantised(block, values)
        squares = None if bad else _squares_of(values, rows.values)
        if use.panels:
            return block, pack_quantised(rows, gated=use.gated), bad, squares
        assert isinstance(rows, QuantisedRows), "tables are w8"
        return block, pack_table(rows), bad, squares

    def _quantised(self, block: _Block, values: npt.NDArray[np.float32]) -> QuantisedRows:
        """The rows of a block; as they are those that the Checkpoint has as w8 has them."""
        use = block.use
        if use.dtype is not DType.W8:
            return quantise(values, use.precision)
        found = [kept_bytes(self._reader, use.tensor, *each) for each in _ranges(block)]
        scale, codes = (np.concatenate([getattr(each, name) for each, _ in found]) for name in ("scale", "codes"))
        searched = ~np.concatenate([kept for _, kept in found])
        if searched.any():
            made = quantise(values[searched], use.precision)
            scale[searched], codes[searched] = made.scale, made.codes
        return QuantisedRows(scale=scale, codes=codes)


def fits_compressed(reader: WeightReader, use: WeightUse) -> bool:
    """Whether all panels of a weight can be stored as bf16c."""
    step, tensor = _block_units(use), use.tensor
    copied = is_copy(tensor, DType.BF16)
    for expert, begin in itertools.product(range(use.experts), range(0, use.units, step)):
        ranges = _ranges(_Block(use=use, expert=expert, begin=begin, end=min(begin + step, use.units), offset=0))
        if copied:
            stored = np.concatenate([reader.read_bits(tensor, *each) for each in ranges])
        else:
            stored = from_float32(np.concatenate([reader.read_rows(tensor, *each) for each in ranges]), DType.BF16)
        if not fits((interleave_gated(stored) if use.gated else stored).view(np.uint16)):
            return False
    return True


def _block_units(use: WeightUse) -> int:
    """Panels or rows of a block: an even number, for gated panels come in pairs."""
    return max(2, BLOCK_BYTES // (4 * use.unit_values) // 2 * 2)


def _ranges(block: _Block) -> list[tuple[int, int]]:
    """The rows of a block; gate rows, then up rows."""
    use = block.use
    if not use.panels:
        return [(block.expert * use.units + block.begin, block.expert * use.units + block.end)]
    n = use.shape[-2]
    first = block.expert * n
    if not use.gated:
        return [(first + block.begin * PANEL, first + min(block.end * PANEL, n))]
    half = n // 2
    low, high = first + block.begin // 2 * PANEL, first + min(block.end // 2 * PANEL, half)
    return [(low, high), (half + low, half + high)]


def _squares_of(values: npt.NDArray[np.float32], packed: npt.NDArray[np.float32]) -> _Squares:
    squares, changes = (np.square(each, dtype=np.float64).sum() for each in (values, packed - values))
    return _Squares(float(squares), float(changes))


def _pack_stored(use: WeightUse, stored: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Rows in the stored type → the bytes of their layout."""
    if not use.panels:
        return stored
    return pack_panels(interleave_gated(stored) if use.gated else stored, use.dtype)
