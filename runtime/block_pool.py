"""The blocks of one cache group: who holds them, and what the free ones still contain.

Every block is free, held by one request or more, or cached: sealed under a key, and held by nobody. A block for new
contents is a free one, else the cached block released longest ago.

A group with a window gives blocks back as its requests move on. So a request claims the most that it ever holds when
its steps compute at most a block's tokens; these blocks are always there for it. What no request claims is for longer
chunks, and goes back after them. So claims may cover the whole pool, and no request waits for a block of a window.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable

from ingot.plan import STATE_SLOTS, window_blocks
from ingot.runtime.block_events import BlockEvents

NO_BLOCK = -1


class BlockPool:
    """free + used + cached = num_blocks.

    window   of the group in tokens; 0: requests keep the blocks of all their tokens
    stride   0; or the group has states: a block is a slot with the state after its last token, and prompts leave a
             snapshot every this many blocks
    claimed  blocks that requests claim, or hold beyond their claims; of a group with a window
    events   hears which keys the pool has from now on, and which it has no more; None: nobody wants to know
    shuffle  hand out blocks in this random order instead of the most recently freed first (which is likely still in a
             cache of the machine); for tests
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, window: int, shuffle: random.Random | None, stride: int = 0
    ) -> None:
        self.num_blocks, self.window, self._size, self.stride = num_blocks, window, tokens_per_block, stride
        self.claimed = 0
        self.events: BlockEvents | None = None
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._sealed: dict[bytes, int] = {}  # key → block
        self._cached: OrderedDict[int, None] = OrderedDict()  # released longest ago first
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._shuffle = shuffle
        self.scatter()

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

    @property
    def spare(self) -> int:
        """Blocks that no request claims; of a group with a window."""
        return self.num_blocks - self.claimed

    def first_seen(self, num_computed: int) -> int:
        """Place of the first block that the token after `num_computed` others sees."""
        return max(num_computed + 1 - self.window, 0) // self._size if self.window else 0

    def claim(self, num_blocks: int) -> int:
        """What a request that grows to this many blocks claims: nothing where blocks are not given back."""
        most = STATE_SLOTS if self.stride else window_blocks(self.window, self._size)
        return min(num_blocks, most) if self.window else 0

    def find(self, key: bytes) -> int | None:
        """The sealed block with these contents."""
        return self._sealed.get(key)

    def holders(self, block: int) -> int:
        """Tables that a block is in."""
        return self._holders[block]

    def free_blocks(self) -> Iterable[int]:
        """Blocks without a holder whose contents nobody needs."""
        return tuple(self._free)

    def allocate(self) -> int:
        """A block for new contents, held once: a free one, else the cached one released longest ago is evicted."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more table has a sealed block."""
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One table less has it."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def seal(self, key: bytes, own: int) -> int:
        """Share a block that is held and full; where an equal one is sealed already, hold that one instead."""
        known = self._sealed.setdefault(key, own)
        if known == own:
            if self._keys[own] is None and self.events is not None:
                self.events.stored(key)
            self._keys[own] = key
        else:
            self.hold(known)
            self.drop(own)
        return known

    def forget(self, block: int) -> None:
        """Nobody finds its contents any more."""
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._sealed[key]
            if self.events is not None:
                self.events.removed(key)

    def scatter(self) -> None:
        """Put the free blocks in another random order, if at all."""
        if self._shuffle is not None:
            self._shuffle.shuffle(self._free)
