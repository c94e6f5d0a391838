"""The blocks of one request, in each cache group, and the keys by which others find them."""

import hashlib
from collections.abc import Sequence

import numpy as np

from ingot.runtime.block_pool import NO_BLOCK
from ingot.step_io import Int32


class BlockTable:
    """The blocks of one request, in the order of its tokens. Only the BlockManager changes it.

    count     blocks that its known tokens need, in groups that keep everything: it holds them
    first     of each group: place of the first block that it holds
    ends      of each group: place after the last block that it holds
    holes     of each group: places between these without a block, of a group with states
    kept      places whose states are kept as snapshots
    claims    of each group: what the pool keeps for it
    sealed    blocks, from the front, that are full and computed; with a prefix cache they have keys and may be shared
    version   another number whenever the blocks are others
    keys      of the full blocks of the known tokens, as far as somebody asked; they outlive the blocks
    promised  keys up to here belong to blocks that the request is about to compute
    awaited   key of the block that somebody else computes, for which the request waits
    """

    __slots__ = (
        "_ids",
        "awaited",
        "claims",
        "count",
        "ends",
        "first",
        "holes",
        "kept",
        "keys",
        "promised",
        "root",
        "sealed",
        "version",
    )

    def __init__(self, salt: bytes = b"") -> None:
        """salt: requests with different salts share nothing."""
        self._ids = np.empty((0, 0), dtype=np.int32)
        self.count = self.sealed = self.promised = self.version = 0
        self.first: list[int] = []
        self.ends: list[int] = []
        self.claims: list[int] = []
        self.holes: list[int] = []
        self.kept: frozenset[int] = frozenset()
        self.root = hashlib.sha256(salt).digest()
        self.keys: list[bytes] = []
        self.awaited: bytes | None = None

    @property
    def ids(self) -> Int32:
        """int32 [groups, count], a view; -1 where there is no block."""
        return self._ids[:, : self.count]

    @property
    def covered(self) -> int:
        """Blocks of tokens that a step may compute up to: every group has them."""
        return min(self.ends, default=0)

    def held(self, group: int) -> list[int]:
        """The blocks that it holds in a group."""
        held: list[int] = self._ids[group, self.first[group] : self.ends[group]].tolist()
        return [block for block in held if block != NO_BLOCK] if self.holes[group] else held

    def num_held(self, group: int) -> int:
        """How many these are."""
        return self.ends[group] - self.first[group] - self.holes[group]

    def extend(self, group: int, blocks: Sequence[int]) -> None:
        """Hold more blocks in a group, behind the others."""
        end = self.ends[group] + len(blocks)
        self.widen(end)
        self._ids[group, self.ends[group] : end] = blocks
        self.ends[group] = end
        self.holes[group] += sum(block == NO_BLOCK for block in blocks)
        self.version += 1

    def widen(self, count: int) -> None:
        """Have places for this many blocks."""
        if count > self._ids.shape[1]:
            self._ids = np.pad(self._ids, ((0, 0), (0, count)), constant_values=NO_BLOCK)
        self.count = max(self.count, count)

    def replace(self, group: int, place: int, block: int) -> None:
        """Hold another block there, or none."""
        self._ids[group, place] = block
        self.version += 1

    def empty(self, first: Sequence[int]) -> None:
        """Forget all blocks. Their keys stay, because the tokens do not change. first: where new blocks begin."""
        self._ids = np.full((len(first), 4), NO_BLOCK, dtype=np.int32)
        self.first, self.ends, self.claims = list(first), list(first), [0] * len(first)
        self.holes, self.kept = [0] * len(first), frozenset()
        self.count = self.sealed = self.promised = 0
        self.version += 1
