"""The packed weights of an engine, a few rows at a time, whatever their layout.

Blocks of a weight hold rows [begin, end); those of a gated product the gate's rows, then the up rows of the same
numbers, as the product's columns need them. The matrices of experts come one after the other.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.parallel_map import parallel_map
from ingot.plan import Plan, Weight, WeightSlice
from ingot.plugins.layouts import num_panels
from ingot.plugins.op import Array
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.weight_rows import WeightRows
from ingot.plugins.weight_values import Inputs, product
from ingot.weight_formats import PANEL

BLOCK_BYTES = 4 << 20  # of a weight as float32

GATED = ".gated"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some rows of a weight (of one of its experts): those that make the columns [begin, end) of the product.

    numbers  of these rows in the weight, those of experts numbered through
    """

    weight: Weight
    expert: int
    begin: int
    end: int
    numbers: npt.NDArray[np.int64]


class PackedWeights:
    """section: all packed weights of an engine, bytes."""

    def __init__(self, plan: Plan, section: npt.NDArray[np.uint8]) -> None:
        self.weights = {weight.name: weight for weight in plan.weights}
        self._section = section

    def whole(self, name: str) -> Array:
        """A norm weight, a bias, a table of frequencies: small and never quantised."""
        values = read_weight(self._section, self.weights[name])
        assert isinstance(values, np.ndarray), f"{name} is quantised"
        return values

    def rows(self, name: str, numbers: npt.NDArray[np.integer]) -> Array:
        """Rows of a table, float32 [len(numbers), cols]."""
        weight = self.weights[name]
        found = (read_weight(self._section, cut(weight, int(row), int(row) + 1)) for row in numbers)
        return np.concatenate([rows.values if isinstance(rows, WeightRows) else rows for rows in found])

    def read(self, block: Block) -> Array | WeightRows:
        """The rows of a block."""
        return read_weight(self._section, cut(block.weight, block.begin, block.end, block.expert))

    def blocks(self, name: str, experts: Collection[int] | None = None) -> Iterator[Block]:
        """All of a weight, in order; of a weight of experts only these, unless None."""
        weight = self.weights[name]
        matrix = weight.shape[-2:]
        gated, n, cols = weight.layout.endswith(GATED), matrix[0], matrix[1] if len(matrix) == 2 else 1
        out = n // 2 if gated else n
        step = max(PANEL, BLOCK_BYTES // (4 * cols * (2 if gated else 1)) // PANEL * PANEL)
        for expert, begin in itertools.product(range(_experts(weight)), range(0, out, step)):
            if experts is not None and expert not in experts:
                continue
            end = min(begin + step, out)
            numbers = expert * n + np.arange(begin, end)
            if gated:
                numbers = np.concatenate([numbers, out + numbers])
            yield Block(weight=weight, expert=expert, begin=begin, end=end, numbers=numbers)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """One of the packed weights, as the references of the ops take it. threads: that share the blocks of products."""

    packed: PackedWeights
    name: str
    threads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.weights[self.name].shape

    @property
    def values(self) -> Array:
        return self.packed.whole(self.name)

    def rows(self, numbers: npt.NDArray[np.integer]) -> Array:
        """Each is read once."""
        distinct, places = np.unique(numbers, return_inverse=True)
        found: Array = self.packed.rows(self.name, distinct)[places.reshape(-1)]
        return found

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Array]:
        """Some columns at a time, joined again: a row's bound needs the whole row."""
        x, n = dict(parts), self.shape[-2]

        def columns(block: Block) -> tuple[Block, Array]:
            return block, product(x[block.expert], self.packed.read(block), activations)

        found = parallel_map(columns, self.packed.blocks(self.name, x), self.threads)
        for expert, blocks in itertools.groupby(found, lambda each: each[0].expert):
            joined: Array = np.empty((len(x[expert]), n), np.float32)
            for block, part in blocks:
                joined[:, block.numbers - expert * n] = part
            yield joined


def cut(weight: Weight, begin: int, end: int, expert: int = 0) -> Weight:
    """Output columns [begin, end) of a product (begin: a multiple of PANEL), or these rows of a table or vector."""
    gated, panels = weight.layout.endswith(GATED), weight.layout.startswith("panel")
    matrix = weight.shape[-2:]
    units = num_panels(matrix[0], gated=gated) if panels else matrix[0]
    unit_bytes, per_unit = weight.nbytes // (_experts(weight) * units), PANEL if panels else 1
    pairs = 2 if gated else 1
    first, last = begin // per_unit * pairs, -(-end // per_unit) * pairs
    pieces = []
    for piece in weight.pieces:
        low, high = max(first, piece.begin), min(last, piece.end)
        if low < high:
            units_before = expert * (piece.end - piece.begin) + low - piece.begin
            offset = piece.offset + units_before * unit_bytes
            pieces.append(WeightSlice(begin=low - first, end=high - first, offset=offset))
    return dataclasses.replace(
        weight, shape=((end - begin) * pairs, *matrix[1:]), nbytes=(last - first) * unit_bytes, pieces=tuple(pieces)
    )


def _experts(weight: Weight) -> int:
    return weight.shape[0] if len(weight.shape) == 3 else 1
