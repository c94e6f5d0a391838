"""What a step does on a GPU: launches and matrix products, with their addresses, and the parts they are made of."""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum

from ingot.plan import CacheGroup, Rows, Step
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.nccl import Communicator
from ingot.plugins.cuda.products import Product
from ingot.plugins.cuda.step_tables import Counts

ANY_ROWS = 1 << 30  # more than any step has
Grid = Callable[[Counts, int], tuple[int, int, int]]
"""(counts, splits of decode) → blocks; a zero means nothing to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel launch; `arguments` in the order of the kernel's parameters. only_split: not where splits is 1.
    head_dim: dims of the heads that the kernel is compiled for; 0 where none matter."""

    kernel: str
    grid: Grid
    threads: int
    shared: int
    arguments: tuple[Argument, ...]
    only_split: bool = False
    head_dim: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """One matrix product of cuBLASLt over all rows of a kind. least: of them, else other launches compute it."""

    product: Product
    rows: Rows
    least: int

    def count(self, counts: Counts) -> int:
        """Rows of a step; 0 where there are too few."""
        rows = count_of(self.rows, counts)
        return rows if rows >= self.least else 0


class Among(Enum):
    """Who exchanges numbers: the ranks of a pipeline stage, or those at the same place of all stages."""

    STAGE = "stage"
    PIPELINE = "pipeline"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What NCCL moves between ranks in a step. run: enqueues it; numbers: how many this rank gets from others; none:
    nothing is moved."""

    among: Among
    run: Callable[[Communicator, Counts], None]
    numbers: Callable[[Counts], int]


Work = Launch | Multiply | Exchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """One plan step."""

    step: Step
    work: tuple[Work, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Device memory of a session.

    tables  by name, see step_tables.py
    kv      of each cache group: [layers][K of all blocks, then V of all blocks]
    num_blocks  of each cache group, the spare one included; of slots of states, which have none
    table_width  integers from a sequence's block tables to those of the next one
    sums    products before their epilogues, float32; those of experts before they are added up
    drawn   the token that the sequence in each slot drew last
    exchanged  what ranks have brought, before it is put together, see exchanges.py
    place   of this rank among those of its pipeline stage
    """

    weights: int
    arena: int
    kv: tuple[int, ...]
    num_blocks: tuple[int, ...]
    sums: int
    drawn: int
    exchanged: int
    place: int
    partial: int
    stats: int
    tables: dict[str, int]
    table_width: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScratchBytes:
    """What `sums` and `exchanged` must hold."""

    sums: int
    exchanged: int


def cache_places(caches: Sequence[CacheGroup], at: Addresses, layer: int) -> tuple[CacheGroup, int, int]:
    """A layer's cache group, and where its keys and its values begin."""
    number = next(i for i, group in enumerate(caches) if layer in group.layers)
    kv, blocks = caches[number], at.num_blocks[number]
    keys = at.kv[number] + kv.layers.index(layer) * blocks * (kv.k_block_bytes + kv.v_block_bytes)
    return kv, keys, keys + blocks * kv.k_block_bytes


def state_places(caches: Sequence[CacheGroup], at: Addresses, layer: int) -> tuple[int, int]:
    """(where slot 0 has the numbers of a layer that keeps a state, numbers of a slot)."""
    number = next(i for i, group in enumerate(caches) if layer in group.layers)
    group = caches[number]
    return at.kv[number] + 4 * group.state_offsets[group.layers.index(layer)], group.state_offsets[-1]


def count_of(rows: Rows, counts: Counts) -> int:
    """How many a step has."""
    return counts.tokens if rows is Rows.TOKENS else counts.logit_rows


def row_grid(rows: Rows, columns: int = 1, least: int = 0) -> Grid:
    """A block per row and strip of columns; none for fewer rows than `least`."""

    def grid(counts: Counts, splits: int) -> tuple[int, int, int]:
        count = count_of(rows, counts)
        return (count if count >= least else 0), columns, 1

    return grid


def pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def integer(value: object) -> ctypes.c_int32:
    return ctypes.c_int32(int(value))  # type: ignore[call-overload]


def number(value: object) -> ctypes.c_float:
    return ctypes.c_float(float(value))  # type: ignore[arg-type]
