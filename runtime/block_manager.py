"""Hands out the blocks of the paged KV cache, and keeps full ones for requests of the same tokens.

    request A  ┌───┬───┬───┐      pool of one layer (every layer has the same numbering)
               │ 5 │ 1 │ 6 │      ┌────┬────┬────┬────┬────┬────┬────┬────┐
    request B  ├───┼───┼───┤      │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │
               │ 5 │ 1 │ 2 │      └────┴────┴────┴────┴────┴────┴────┴────┘
               └───┴───┴───┘       free  2x   1x  free cached 2x   1x cached

The first 64 tokens of A and B are equal: with 32 tokens per block both hold 5 and 1. A block that is full and computed
is sealed: it gets a key, the SHA-256 of the key before it and its own tokens, and is never written again. So nothing
is copied on a write: requests that part write to blocks of their own, and blocks that are not full have one holder.
A sealed block that nobody holds stays cached until its place is needed, the one released longest ago first.
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from ingot.step_io import Int32


class BlockTable:
    """The blocks of one request, in the order of its tokens. Only the BlockManager changes it.

    count     blocks that the request holds
    sealed    of these, from the front, the ones that have keys and may be shared
    version   another number whenever the blocks are others
    keys      of the full blocks of the known tokens, as far as somebody asked; they outlive the blocks
    promised  keys up to here belong to blocks that the request is about to compute
    awaited   key of the block that somebody else computes, for which the request waits
    """

    __slots__ = ("_ids", "awaited", "count", "keys", "promised", "root", "sealed", "version")

    def __init__(self, salt: bytes = b"") -> None:
        """salt: requests with different salts share nothing."""
        self._ids = np.full(4, -1, dtype=np.int32)
        self.count = self.sealed = self.promised = self.version = 0
        self.root = hashlib.sha256(salt).digest()
        self.keys: list[bytes] = []
        self.awaited: bytes | None = None

    @property
    def ids(self) -> Int32:
        """int32 [count], a view."""
        return self._ids[: self.count]

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks."""
        end = self.count + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.full(end, -1, dtype=np.int32)])
        self._ids[self.count : end] = blocks
        self.count = end
        self.version += 1

    def replace(self, place: int, block: int) -> None:
        """Hold another block, equal in content, at `place`."""
        self._ids[place] = block
        self.version += 1

    def clear(self) -> None:
        """Forget all blocks, but not their keys: the tokens stay what they are."""
        self.count = self.sealed = self.promised = 0
        self.version += 1


class BlockManager:
    """num_blocks of tokens_per_block slots each: free + used + cached = num_blocks.

    prefix_cache  False: every block has one holder and nothing is kept
    shuffle       hand out blocks in this random order instead of the most recently freed first (which is likely still
                  in a cache of the machine); for tests
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, *, prefix_cache: bool = True, shuffle: random.Random | None = None
    ) -> None:
        self.num_blocks, self.tokens_per_block = num_blocks, tokens_per_block
        self._prefix_cache = prefix_cache
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._sealed: dict[bytes, int] = {}  # key → block
        self._promised: dict[bytes, BlockTable] = {}  # key → who computes such a block now
        self._cached: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._shuffle = shuffle
        self._scatter()

    @property
    def num_available(self) -> int:
        """Blocks without a holder: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that are kept for their contents."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `table` lacks to hold `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - table.count)

    def lookup(self, table: BlockTable, tokens: Int32, limit: int) -> list[int] | None:
        """Blocks that hold the head of `tokens`, at most `limit` tokens; changes nothing but keys.

        None: the next block is being computed for somebody else; ask again after the next step.
        """
        if table.awaited in self._promised:
            return None
        table.awaited = None
        if not self._prefix_cache:
            return []
        hits: list[int] = []
        wanted = limit // self.tokens_per_block
        self._extend_keys(table, tokens, wanted)
        for key in table.keys[:wanted]:
            block = self._sealed.get(key)
            if block is None:
                if key in self._promised:
                    table.awaited = key
                    return None
                break
            hits.append(block)
        return hits

    def taken(self, hits: Sequence[int], num_tokens: int) -> int:
        """How many available blocks it takes to hold `num_tokens` tokens, `hits` among them."""
        return self.blocks_for(num_tokens) - sum(self._holders[block] > 0 for block in hits)

    def start(self, table: BlockTable, hits: Sequence[int], tokens: Int32) -> bool:
        """Give an empty table the blocks of all `tokens`, beginning with `hits`; False, and nothing changed, if too
        few blocks are available. Until they are sealed, others with the same tokens wait for them.
        """
        if self.taken(hits, len(tokens)) > self.num_available:
            return False
        for block in hits:
            self._hold(block)
        table.extend(hits)
        table.sealed = len(hits)
        reserved = self.reserve(table, len(tokens))
        assert reserved, "taken() counted the blocks"
        if self._prefix_cache:
            table.promised = len(tokens) // self.tokens_per_block
            self._extend_keys(table, tokens, table.promised)
            for key in table.keys[table.sealed : table.promised]:
                self._promised.setdefault(key, table)
        return True

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow `table` to hold `num_tokens` tokens; False, and nothing changed, if too few blocks are available."""
        wanted = self.missing(table, num_tokens)
        if wanted > self.num_available:
            return False
        if wanted:
            table.extend([self._take() for _ in range(wanted)])
        return True

    def seal(self, table: BlockTable, tokens: Int32, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache: their full blocks may be shared from now on.

        Where somebody sealed an equal block before, the table holds that one instead of its own.
        """
        full = num_computed // self.tokens_per_block
        if not self._prefix_cache or full <= table.sealed:
            return
        self._extend_keys(table, tokens, full)
        for place in range(table.sealed, full):
            key, own = table.keys[place], int(table.ids[place])
            self._keep_promise(table, key)
            known = self._sealed.setdefault(key, own)
            if known == own:
                self._keys[own] = key
            else:
                self._hold(known)
                table.replace(place, known)
                self._drop(own)
        table.sealed = full

    def release(self, table: BlockTable) -> None:
        """Take back every block of `table`. Those that nobody else holds are cached if sealed, the last ones to go
        first, and free otherwise."""
        for key in table.keys[table.sealed : table.promised]:
            self._keep_promise(table, key)
        for block in table.ids[::-1].tolist():
            self._drop(block)
        table.clear()
        self._scatter()

    def forget(self, table: BlockTable) -> None:
        """The contents of `table`'s blocks are not to be trusted: nobody finds them any more."""
        for block in table.ids.tolist():
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._sealed[key]

    def num_alone(self, table: BlockTable) -> int:
        """Blocks that only `table` holds."""
        return sum(self._holders[block] == 1 for block in table.ids.tolist())

    def holders(self, block: int) -> int:
        """Tables that a block is in."""
        return self._holders[block]

    def free_blocks(self) -> Iterable[int]:
        """Blocks without a holder whose contents nobody needs."""
        return tuple(self._free)

    def _extend_keys(self, table: BlockTable, tokens: Int32, count: int) -> None:
        for place in range(len(table.keys), count):
            before = table.keys[-1] if place else table.root
            own = tokens[place * self.tokens_per_block : (place + 1) * self.tokens_per_block]
            table.keys.append(hashlib.sha256(before + own.tobytes()).digest())

    def _keep_promise(self, table: BlockTable, key: bytes) -> None:
        if self._promised.get(key) is table:
            del self._promised[key]

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _take(self) -> int:
        """A block for new contents: a free one, else the cached one released longest ago is evicted."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key, self._keys[block] = self._keys[block], None
            assert key is not None, "only sealed blocks are cached"
            del self._sealed[key]
        self._holders[block] = 1
        return block

    def _scatter(self) -> None:
        if self._shuffle is not None:
            self._shuffle.shuffle(self._free)
