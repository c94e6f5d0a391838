"""Where packed weights lie in the weights section, and their bytes, block by block in the order of the file.

0            shard 0 of every product, in order of use
n * 2 MiB    shard 1 of every product, ...          one shard per thread: it streams its part front to back
...          then tables, norm weights and biases ("row")
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import WeightReader, matrix_shape
from ingot.dtypes import DType, from_float32
from ingot.engine import PIECE_ALIGNMENT, SECTION_ALIGNMENT, aligned
from ingot.plan import Piece, Plan, Weight
from ingot.plugins.layouts import PANEL, interleave_gated, num_panels, pack_panels, panel_bytes, panel_layout
from ingot.plugins.target import Constant

GATED = ".gated"
CODE_ALIGNMENT = 4096  # constants may be mapped by themselves
SMALL_MODEL = 32 << 20  # below this many bytes of products, one shard
BLOCK_BYTES = 4 << 20  # float32 bytes of weight in memory at a time

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightUse:
    """A weight as a step wants it. panels: packed for a product; gated: gate and up rows interleaved."""

    name: str
    tensor: gs.Tensor
    dtype: DType
    shape: tuple[int, ...]
    panels: bool = False
    gated: bool = False

    @property
    def layout(self) -> str:
        """Name of the layout, see `plugins/layouts.py`."""
        return panel_layout(self.dtype) + (GATED if self.gated else "") if self.panels else "row"

    @property
    def units(self) -> int:
        """Panels of a product, rows of anything else."""
        return num_panels(self.shape[0], gated=self.gated) if self.panels else self.shape[0]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one panel or row."""
        cols = matrix_shape(self.tensor)[1]
        return panel_bytes(cols, self.dtype) if self.panels else cols * self.dtype.itemsize


def shard_count(uses: Sequence[WeightUse], wanted: int) -> int:
    """One shard where all products together are small, else as many as wanted."""
    total = sum(use.units * use.unit_bytes for use in uses if use.panels)
    return 1 if total < SMALL_MODEL else wanted


def place_weights(uses: Sequence[WeightUse], shards: int) -> tuple[list[Weight], int]:
    """(weights in the order of `uses`, bytes of the section)."""
    pieces: dict[str, list[Piece]] = {use.name: [] for use in uses}
    position = 0
    for shard in range(shards):
        position = aligned(position, SECTION_ALIGNMENT)
        for use in uses:
            if not use.panels:
                continue
            step = 2 if use.gated else 1  # gate and up panels of the same columns stay together
            begin, end = (use.units // step * i // shards * step for i in (shard, shard + 1))
            if begin < end:
                position = aligned(position, PIECE_ALIGNMENT)
                pieces[use.name].append(Piece(begin=begin, end=end, offset=position))
                position += (end - begin) * use.unit_bytes
    for use in uses:
        if not use.panels:
            position = aligned(position, PIECE_ALIGNMENT)
            pieces[use.name].append(Piece(begin=0, end=use.units, offset=position))
            position += use.units * use.unit_bytes
    weights = [
        Weight(
            name=use.name, dtype=use.dtype, shape=use.shape, layout=use.layout, nbytes=use.units * use.unit_bytes,
            pieces=tuple(pieces[use.name]),
        )
        for use in uses
    ]  # fmt: skip
    return weights, position


def add_constants(plan: Plan, constants: Sequence[Constant]) -> Plan:
    """The plan with each constant as one more weight, of bytes, behind all others."""
    weights, position = list(plan.weights), plan.weight_bytes
    for constant in constants:
        position, size = aligned(position, CODE_ALIGNMENT), len(constant.data)
        piece = Piece(begin=0, end=size, offset=position)
        weights.append(
            Weight(
                name=constant.name, dtype=DType.I8, shape=(size,), layout=constant.layout, nbytes=size, pieces=(piece,)
            )
        )  # fmt: skip
        position += size
    return dataclasses.replace(plan, weights=tuple(weights), weight_bytes=position)


class Packer:
    """Reads, rounds and packs. After `blocks` is exhausted, `nonfinite` counts NaN and infinite values by weight."""

    def __init__(self, reader: WeightReader, uses: Sequence[WeightUse], weights: Sequence[Weight]) -> None:
        self._reader = reader
        self._uses = {use.name: use for use in uses}
        own = [weight for weight in weights if weight.name in self._uses]
        self._pieces = sorted(
            ((piece, weight.name) for weight in own for piece in weight.pieces), key=lambda each: each[0].offset
        )
        self.nonfinite: dict[str, int] = {}

    def blocks(self, progress: Progress) -> Iterator[tuple[int, memoryview]]:
        """(offset in the section, bytes), ascending. progress: called with the bytes of each block."""
        for piece, name in self._pieces:
            use = self._uses[name]
            values_per_unit = use.unit_bytes // use.dtype.itemsize
            step = max(2, BLOCK_BYTES // (4 * values_per_unit) // 2 * 2)  # even: pairs of gated panels
            for begin in range(piece.begin, piece.end, step):
                end = min(begin + step, piece.end)
                packed = self._packed(use, begin, end)
                data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8).data
                progress(len(data))
                yield piece.offset + (begin - piece.begin) * use.unit_bytes, data

    def _packed(self, use: WeightUse, begin: int, end: int) -> npt.NDArray[np.generic]:
        """Units [begin, end)."""
        if not use.panels:
            return self._rounded(use, begin, end)
        n = use.shape[0]
        if not use.gated:
            return pack_panels(self._rounded(use, begin * PANEL, min(end * PANEL, n)), use.dtype)
        half = n // 2
        low, high = begin // 2 * PANEL, min(end // 2 * PANEL, half)
        gate, up = self._rounded(use, low, high), self._rounded(use, half + low, half + high)
        return pack_panels(interleave_gated(np.concatenate([gate, up])), use.dtype)

    def _rounded(self, use: WeightUse, begin: int, end: int) -> npt.NDArray[np.generic]:
        """Rows [begin, end) in the type of the use."""
        values = self._reader.read_rows(use.tensor, begin, end)
        stored = from_float32(values, use.dtype)
        if bad := int(values.size - np.count_nonzero(np.isfinite(values))):
            self.nonfinite[use.name] = self.nonfinite.get(use.name, 0) + bad
        return stored
