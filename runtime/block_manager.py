"""Hands out the blocks of the paged KV cache.

    block table of a request         pool of one layer (every layer has the same numbering)
    ┌───┬───┬───┬────┐               ┌────┬────┬────┬────┬────┬────┬────┬────┐
    │ 5 │ 1 │ 6 │ -1 │               │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │
    └───┴───┴───┴────┘               └────┴────┴────┴────┴────┴────┴────┴────┘
      │   │   └── tokens 64 .. 95 (the last ones not yet written)    0, 2, 3, 4, 7 are free
      │   └────── tokens 32 .. 63
      └────────── tokens  0 .. 31      with 32 tokens per block

A request's table grows with its tokens (`reserve`) and is emptied at once when it ends or is preempted (`release`).
Each block has at most one holder. Sharing equal prompt heads adds a count of holders here and a lookup before
`reserve`; nothing outside this file knows how many hold a block.
"""

import random
from collections.abc import Iterable

import numpy as np

from ingot.step_io import Int32


class BlockTable:
    """The blocks of one request, in the order of its tokens."""

    __slots__ = ("_ids", "count")

    def __init__(self) -> None:
        self._ids = np.full(4, -1, dtype=np.int32)
        self.count = 0

    @property
    def ids(self) -> Int32:
        """int32 [count], a view."""
        return self._ids[: self.count]

    def extend(self, blocks: list[int]) -> None:
        """Append blocks."""
        end = self.count + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.full(end, -1, dtype=np.int32)])
        self._ids[self.count : end] = blocks
        self.count = end

    def clear(self) -> None:
        """Forget all blocks."""
        self.count = 0


class BlockManager:
    """num_blocks of tokens_per_block slots each.

    shuffle  hand out blocks in this random order instead of the most recently freed first (which is likely still in
             a cache of the machine); for tests
    """

    def __init__(self, num_blocks: int, tokens_per_block: int, *, shuffle: random.Random | None = None) -> None:
        self.num_blocks, self.tokens_per_block = num_blocks, tokens_per_block
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._shuffle = shuffle
        self._scatter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `table` lacks to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - table.count)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow `table` to hold `num_tokens` tokens; False, and nothing changed, if too few blocks are free."""
        wanted = self.missing(table, num_tokens)
        if wanted > len(self._free):
            return False
        if wanted:
            table.extend([self._free.pop() for _ in range(wanted)])
        return True

    def release(self, table: BlockTable) -> None:
        """Take back every block of `table`."""
        self._free.extend(int(block) for block in table.ids[::-1])
        table.clear()
        self._scatter()

    def free_blocks(self) -> Iterable[int]:
        """Blocks without a holder."""
        return tuple(self._free)

    def _scatter(self) -> None:
        if self._shuffle is not None:
            self._shuffle.shuffle(self._free)
