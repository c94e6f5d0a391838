"""Blocks: free + used + cached = total, holders are counted, a hit returns equal tokens, nothing leaks."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ingot.runtime.block_manager import BlockManager, BlockTable

Tokens = tuple[int, ...]


class Holder:
    """A table, all its tokens so far, and how many of them are computed."""

    def __init__(self, tokens: list[int], salt: bytes) -> None:
        self.table, self.tokens, self.salt, self.computed = BlockTable(salt), tokens, salt, 0

    def array(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(self.tokens, dtype=np.int32)


class BlockMachine(RuleBasedStateMachine):
    """Requests of few different tokens begin, compute, grow and end in any order; `written` is the true content."""

    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        seed=st.none() | st.integers(0, 9),
        prefix_cache=st.booleans() | st.just(True),
    )
    def begin(self, num_blocks: int, size: int, seed: int | None, prefix_cache: bool) -> None:
        shuffle = None if seed is None else random.Random(seed)
        self.manager = BlockManager(num_blocks, size, prefix_cache=prefix_cache, shuffle=shuffle)
        self.size, self.prefix_cache = size, prefix_cache
        self.live: list[Holder] = []
        self.written: dict[int, tuple[bytes, Tokens]] = {}  # block → salt and all tokens up to its last slot

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from([b"", b"", b"other"]),
        use_hits=st.booleans() | st.just(True),
    )
    def start(self, tokens: list[int], salt: bytes, use_hits: bool) -> None:
        holder = Holder(tokens, salt)
        limit = len(tokens) - 1 if use_hits else 0
        hits = self.manager.lookup(holder.table, holder.array(), limit)
        if hits is None:
            assert any(other.computed < len(other.tokens) for other in self.live), "waits for nobody"
            return
        assert len(hits) * self.size <= limit
        assert self.prefix_cache or not hits
        for place, block in enumerate(hits):
            assert self.written[block] == (salt, tuple(tokens[: (place + 1) * self.size]))
        taken, available = self.manager.taken(hits, len(tokens)), self.manager.num_available
        started = self.manager.start(holder.table, hits, holder.array())
        assert started == (taken <= available)
        if started:
            assert self.manager.num_available == available - taken
            holder.computed = len(hits) * self.size
            self.live.append(holder)
        else:
            assert holder.table.count == 0

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 9))
    def compute(self, which: int, count: int) -> None:
        holder = self.live[which % len(self.live)]
        end = min(holder.computed + count, len(holder.tokens))
        for position in range(holder.computed, end):
            block = int(holder.table.ids[position // self.size])
            assert self.manager.holders(block) == 1, "a write to a shared block"
            self.written[block] = (holder.salt, tuple(holder.tokens[: position + 1]))
        holder.computed = end
        self.manager.seal(holder.table, holder.array(), end)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        holder = self.live[which % len(self.live)]
        before = holder.table.ids.tolist()
        if self.manager.reserve(holder.table, len(holder.tokens) + 1):
            holder.tokens.append(token)
        assert holder.table.ids[: len(before)].tolist() == before

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), failed=st.booleans())
    def end(self, which: int, failed: bool) -> None:
        holder = self.live.pop(which % len(self.live))
        blocks, cached = holder.table.ids.tolist(), self.manager.num_cached
        if failed:
            self.manager.forget(holder.table)
        self.manager.release(holder.table)
        assert holder.table.count == 0
        if failed or not self.prefix_cache:
            assert self.manager.num_cached == cached
            assert set(blocks) <= set(self.manager.free_blocks()) | {b for o in self.live for b in o.table.ids.tolist()}

    @invariant()
    def balanced(self) -> None:
        held = Counter(block for holder in self.live for block in holder.table.ids.tolist())
        manager = self.manager
        assert manager.num_free + manager.num_used + manager.num_cached == manager.num_blocks
        assert len(held) == manager.num_used
        assert not held.keys() & set(manager.free_blocks())
        for block in range(manager.num_blocks):
            assert manager.holders(block) == held[block]
        if not self.live:
            assert manager.num_used == 0

    @invariant()
    def shared_blocks_are_full_and_equal(self) -> None:
        seen: dict[int, tuple[bytes, Tokens]] = {}
        shared = {b for b, n in Counter(b for h in self.live for b in h.table.ids.tolist()).items() if n > 1}
        for holder in self.live:
            assert holder.table.count == self.manager.blocks_for(len(holder.tokens))
            for place, block in enumerate(holder.table.ids.tolist()):
                end = (place + 1) * self.size
                if end <= holder.computed:
                    assert self.written[block] == (holder.salt, tuple(holder.tokens[:end]))
                if block in shared:
                    assert end <= holder.computed
                    content = (holder.salt, tuple(holder.tokens[:end]))
                    assert seen.setdefault(block, content) == content


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=80, stateful_step_count=40)


def computed(manager: BlockManager, tokens: list[int]) -> BlockTable:
    """A table whose tokens are all in the cache."""
    table, array = BlockTable(), np.array(tokens, np.int32)
    hits = manager.lookup(table, array, len(tokens))
    assert hits is not None
    assert manager.start(table, hits, array)
    manager.seal(table, array, len(tokens))
    return table


def cached_head(manager: BlockManager, tokens: list[int]) -> int:
    """Blocks that the cache has of these tokens."""
    hits = manager.lookup(BlockTable(), np.array(tokens, np.int32), len(tokens))
    return -1 if hits is None else len(hits)


def test_the_block_released_longest_ago_is_evicted_first_and_tails_before_heads() -> None:
    manager = BlockManager(6, 2)
    first, second = computed(manager, [1, 1, 2, 2]), computed(manager, [3, 3, 4, 4])
    manager.release(second)
    manager.release(first)
    third = BlockTable()
    assert manager.reserve(third, 6)  # the 2 free blocks, then one of `second`
    assert cached_head(manager, [3, 3, 4, 4]) == 1
    assert cached_head(manager, [1, 1, 2, 2]) == 2
    assert manager.reserve(third, 8)
    assert cached_head(manager, [3, 3, 4, 4]) == 0
    assert manager.reserve(third, 10)
    assert cached_head(manager, [1, 1, 2, 2]) == 1


def test_a_hit_keeps_its_blocks_from_eviction() -> None:
    manager = BlockManager(4, 2)
    manager.release(computed(manager, [1, 1, 2, 2]))
    again = computed(manager, [1, 1, 2, 2, 5, 5])
    assert manager.num_used == 3
    assert not manager.reserve(BlockTable(), 4)
    manager.release(again)
    assert manager.num_cached == 3


def test_equal_blocks_computed_twice_become_one() -> None:
    manager = BlockManager(8, 2)
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        assert manager.start(table, [], tokens)
    assert manager.num_used == 6
    for table in tables:
        manager.seal(table, tokens, 5)
    assert manager.num_used == 4
    assert tables[0].ids[:2].tolist() == tables[1].ids[:2].tolist()
    assert tables[0].ids[2] != tables[1].ids[2]


def test_shuffled_blocks_are_scattered() -> None:
    table = BlockTable()
    manager = BlockManager(64, 4, shuffle=random.Random(1))
    assert manager.reserve(table, 64 * 4)
    assert table.ids.tolist() != sorted(table.ids.tolist())
    assert sorted(table.ids.tolist()) == list(range(64))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager(9, 4).blocks_for(tokens) == blocks


def test_a_table_says_when_its_blocks_are_others() -> None:
    table = BlockTable()
    versions = [table.version]
    table.extend([3, 5])
    versions.append(table.version)
    table.replace(1, 4)
    versions.append(table.version)
    table.clear()
    versions.append(table.version)
    assert len(set(versions)) == 4


def test_a_cached_hit_takes_a_block_and_a_held_one_does_not() -> None:
    manager, tokens = BlockManager(3, 2), np.array([1, 1, 2, 2], np.int32)
    manager.release(computed(manager, [1, 1]))
    others = BlockTable()
    assert manager.reserve(others, 4)
    hits = manager.lookup(BlockTable(), tokens, 2)
    assert hits is not None
    assert len(hits) == 1
    assert manager.taken(hits, 4) == 2
    assert not manager.start(BlockTable(), hits, tokens), "the hit is the last block that is available"
    holder = BlockTable()
    assert manager.start(holder, hits, tokens[:2])
    assert manager.taken(hits, 4) == 1
