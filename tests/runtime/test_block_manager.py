"""Blocks: free + used + cached = total, holders are counted, a hit returns equal tokens, nothing leaks."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ingot.plan import STATE_SLOTS, STATE_WINDOW, window_blocks
from ingot.runtime.block_manager import BlockManager, Hits
from ingot.runtime.block_table import BlockTable

Tokens = tuple[int, ...]
KINDS = [(0, 0), (0, 0), *((window, 0) for window in (1, 2, 3, 5, 9)), (STATE_WINDOW, 1), (STATE_WINDOW, 3)]
"""(window, stride of snapshots) of a group"""


class Holder:
    """A table, all its tokens so far, how many of them are computed, and how many there may be in the end."""

    def __init__(self, tokens: list[int], salt: bytes, most: int) -> None:
        self.table, self.tokens, self.salt, self.computed, self.most = BlockTable(salt), tokens, salt, 0, most

    def array(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(self.tokens, dtype=np.int32)


class BlockMachine(RuleBasedStateMachine):
    """Requests of few different tokens begin, compute, grow and end in any order; `written` is the true content."""

    @initialize(
        num_blocks=st.integers(1, 12),
        kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 6)), min_size=1, max_size=3),
        size=st.integers(1, 4),
        seed=st.none() | st.integers(0, 9),
        prefix_cache=st.booleans() | st.just(True),
    )
    def begin(
        self, num_blocks: int, kinds: list[tuple[tuple[int, int], int]], size: int, seed: int | None, prefix_cache: bool
    ) -> None:
        shuffle = None if seed is None else random.Random(seed)
        self.windows, self.strides = [window for (window, _), _ in kinds], [stride for (_, stride), _ in kinds]
        counts = [
            (STATE_SLOTS if stride else window_blocks(window, size)) + more if window else num_blocks
            for (window, stride), more in kinds
        ]
        self.manager = BlockManager(
            counts, size, windows=self.windows, strides=self.strides, prefix_cache=prefix_cache, shuffle=shuffle
        )
        self.size, self.prefix_cache = size, prefix_cache
        self.live: list[Holder] = []
        # of each group: block → salt and all tokens up to its last slot
        self.written: list[dict[int, tuple[bytes, Tokens]]] = [{} for _ in kinds]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        more=st.integers(0, 6),
        salt=st.sampled_from([b"", b"", b"other"]),
        use_hits=st.booleans() | st.just(True),
    )
    def start(self, tokens: list[int], more: int, salt: bytes, use_hits: bool) -> None:
        holder = Holder(tokens, salt, len(tokens) + more)
        limit = len(tokens) - 1 if use_hits else 0
        hits = self.manager.lookup(holder.table, holder.array(), limit)
        if hits is None:
            assert any(other.computed < len(other.tokens) for other in self.live), "waits for nobody"
            return
        assert hits.count * self.size <= limit
        assert self.prefix_cache or not hits.count
        for window, blocks, written in zip(self.windows, hits.blocks, self.written, strict=True):
            first = first_seen(hits.count * self.size, window) // self.size
            assert len(blocks) == hits.count - first, "the blocks that the next token sees"
            for place, block in enumerate(blocks, start=first):
                assert written[block] == (salt, tuple(tokens[: (place + 1) * self.size]))
        pools, available = self.manager.pools, [pool.num_available for pool in self.manager.pools]
        room = self.manager.has_room(hits, len(tokens), holder.most, 0)
        reach = self.manager.reach(holder.table, hits)
        assert self.manager.start(holder.table, hits, holder.array(), holder.most) == room
        if room:
            assert self.manager.reach(holder.table) >= min(reach, holder.most), "a start is as good as its estimate"
            holder.computed = hits.count * self.size
            self.live.append(holder)
        else:
            assert holder.table.count == 0
            assert [pool.num_available for pool in pools] == available

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 30))
    def compute(self, which: int, count: int) -> None:
        holder = self.live[which % len(self.live)]
        reach = self.manager.reach(holder.table)
        assert reach >= min(holder.computed + self.size, len(holder.tokens)), "every request can go on"
        end = min(holder.computed + count, len(holder.tokens), reach)
        self.manager.cover(holder.table, end)
        for group, (pool, window) in enumerate(zip(self.manager.pools, self.windows, strict=True)):
            ids, written = holder.table.ids[group], self.written[group]
            for position in range(first_seen(holder.computed, window), holder.computed):
                place = position // self.size
                content = tuple(holder.tokens[: min((place + 1) * self.size, holder.computed)])
                assert written[int(ids[place])] == (holder.salt, content), "what the step sees is there"
            for position in range(holder.computed, end):
                block = int(ids[position // self.size])
                if block < 0:
                    assert self.strides[group], "only states need not be kept"
                    assert position // self.size < (end - 1) // self.size, "the step leaves its state"
                    continue
                assert pool.holders(block) == 1, "a write to a shared block"
                written[block] = (holder.salt, tuple(holder.tokens[: position + 1]))
        holder.computed = end
        self.manager.advance(holder.table, holder.array(), end)
        for group, window in enumerate(self.windows):
            first = first_seen(end, window) // self.size
            assert (holder.table.ids[group, :first] < 0).all(), "blocks behind the window are given back"

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        """As a request that decodes: all but its last token are computed."""
        holder = self.live[which % len(self.live)]
        if holder.computed < len(holder.tokens) - 1 or len(holder.tokens) == holder.most:
            return
        before = holder.table.ids.copy()
        if self.manager.reserve([(holder.table, len(holder.tokens) + 1)]):
            holder.tokens.append(token)
        else:
            # two tokens lie in two blocks at most, but where a block has one: a state then needs a third slot
            assert 0 in self.windows or (self.size == 1 and any(self.strides)), "windows always have room"
        after = holder.table.ids[:, : before.shape[1]]
        assert (after[before >= 0] == before[before >= 0]).all()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), failed=st.booleans())
    def end(self, which: int, failed: bool) -> None:
        holder = self.live.pop(which % len(self.live))
        blocks = [holder.table.held(group) for group in range(len(self.windows))]
        cached = [pool.num_cached for pool in self.manager.pools]
        if failed:
            self.manager.forget(holder.table)
        self.manager.release(holder.table)
        assert holder.table.count == 0
        if failed or not self.prefix_cache:
            for group, pool in enumerate(self.manager.pools):
                assert pool.num_cached == cached[group]
                others = {block for other in self.live for block in other.table.held(group)}
                assert set(blocks[group]) <= set(pool.free_blocks()) | others

    @invariant()
    def balanced(self) -> None:
        for group, pool in enumerate(self.manager.pools):
            held = Counter(block for holder in self.live for block in holder.table.held(group))
            assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks
            assert len(held) == pool.num_used
            assert not held.keys() & set(pool.free_blocks())
            for block in range(pool.num_blocks):
                assert pool.holders(block) == held[block]
            if pool.window:
                tables = [holder.table for holder in self.live]
                assert pool.claimed == sum(max(each.claims[group], len(each.held(group))) for each in tables)
                assert pool.claimed <= pool.num_blocks
            if not self.live:
                assert pool.num_used == pool.claimed == 0

    @invariant()
    def shared_blocks_are_full_and_equal(self) -> None:
        for group, written in enumerate(self.written):
            seen: dict[int, tuple[bytes, Tokens]] = {}
            shared = {b for b, n in Counter(b for h in self.live for b in h.table.held(group)).items() if n > 1}
            for holder in self.live:
                if not self.windows[group]:
                    assert holder.table.ends[group] == self.manager.blocks_for(len(holder.tokens))
                for place, block in enumerate(holder.table.ids[group].tolist()):
                    if block < 0:
                        continue
                    end = (place + 1) * self.size
                    if end <= holder.computed:
                        assert written[block] == (holder.salt, tuple(holder.tokens[:end]))
                    if block in shared:
                        assert end <= holder.computed
                        content = (holder.salt, tuple(holder.tokens[:end]))
                        assert seen.setdefault(block, content) == content


def first_seen(num_computed: int, window: int) -> int:
    """The first token that the one after `num_computed` sees."""
    return max(num_computed + 1 - window, 0) if window else 0


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.slow
def test_blocks_for_longer() -> None:
    run_state_machine_as_test(BlockMachine, settings=settings(max_examples=200, stateful_step_count=40))


def computed(manager: BlockManager, tokens: list[int]) -> BlockTable:
    """A table whose tokens are all in the cache."""
    table, array = BlockTable(), np.array(tokens, np.int32)
    hits = manager.lookup(table, array, len(tokens))
    assert hits is not None
    assert manager.start(table, hits, array, len(tokens))
    manager.cover(table, len(tokens))
    manager.advance(table, array, len(tokens))
    return table


def cached_head(manager: BlockManager, tokens: list[int]) -> int:
    """Blocks that the cache has of these tokens."""
    hits = manager.lookup(BlockTable(), np.array(tokens, np.int32), len(tokens))
    return -1 if hits is None else hits.count


def test_the_block_released_longest_ago_is_evicted_first_and_tails_before_heads() -> None:
    manager = BlockManager((6,), 2)
    first, second = computed(manager, [1, 1, 2, 2]), computed(manager, [3, 3, 4, 4])
    manager.release(second)
    manager.release(first)
    third = BlockTable()
    assert manager.reserve([(third, 6)])  # the 2 free blocks, then one of `second`
    assert cached_head(manager, [3, 3, 4, 4]) == 1
    assert cached_head(manager, [1, 1, 2, 2]) == 2
    assert manager.reserve([(third, 8)])
    assert cached_head(manager, [3, 3, 4, 4]) == 0
    assert manager.reserve([(third, 10)])
    assert cached_head(manager, [1, 1, 2, 2]) == 1


def test_a_hit_keeps_its_blocks_from_eviction() -> None:
    manager = BlockManager((4,), 2)
    manager.release(computed(manager, [1, 1, 2, 2]))
    again = computed(manager, [1, 1, 2, 2, 5, 5])
    assert manager.num_used == 3
    assert not manager.reserve([(BlockTable(), 4)])
    manager.release(again)
    assert manager.num_cached == 3


def test_equal_blocks_computed_twice_become_one() -> None:
    manager = BlockManager((8,), 2)
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        assert manager.start(table, Hits(count=0, blocks=([],)), tokens, 5)
    assert manager.num_used == 6
    for table in tables:
        manager.advance(table, tokens, 5)
    assert manager.num_used == 4
    assert tables[0].ids[0, :2].tolist() == tables[1].ids[0, :2].tolist()
    assert tables[0].ids[0, 2] != tables[1].ids[0, 2]


def test_shuffled_blocks_are_scattered() -> None:
    table = BlockTable()
    manager = BlockManager((64,), 4, shuffle=random.Random(1))
    assert manager.reserve([(table, 64 * 4)])
    assert table.ids[0].tolist() != sorted(table.ids[0].tolist())
    assert sorted(table.ids[0].tolist()) == list(range(64))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager((9,), 4).blocks_for(tokens) == blocks


def test_a_table_says_when_its_blocks_are_others() -> None:
    table = BlockTable()
    versions = [table.version]
    table.empty([0])
    versions.append(table.version)
    table.extend(0, [3, 5])
    versions.append(table.version)
    table.replace(0, 1, 4)
    versions.append(table.version)
    table.empty([0])
    versions.append(table.version)
    assert len(set(versions)) == 5


def test_a_cached_hit_takes_a_block_and_a_held_one_does_not() -> None:
    manager, tokens = BlockManager((3,), 2), np.array([1, 1, 2, 2], np.int32)
    manager.release(computed(manager, [1, 1]))
    others = BlockTable()
    assert manager.reserve([(others, 4)])
    hits = manager.lookup(BlockTable(), tokens, 2)
    assert hits is not None
    assert hits.count == 1
    assert not manager.start(BlockTable(), hits, tokens, 4), "the hit is the last block that is available"
    holder = BlockTable()
    assert manager.start(holder, hits, tokens[:2], 2)
    manager.release(others)
    assert manager.has_room(hits, 4, 4, beside=1), "the held one is counted once"
    assert not manager.has_room(hits, 4, 4, beside=2)


def windowed(num_blocks: int = 8) -> BlockManager:
    """One group that keeps everything, one with a window of 3 tokens; blocks of 2."""
    return BlockManager((60, num_blocks), 2, windows=(0, 3))


def test_a_long_request_holds_no_more_blocks_of_a_window_than_it_claims() -> None:
    manager, tokens = windowed(), np.arange(40, dtype=np.int32)
    table, held = BlockTable(), []
    assert manager.start(table, Hits(count=0, blocks=([], [])), tokens, 40)
    for end in range(1, 41):
        manager.cover(table, end)
        held.append(len(table.held(1)))
        manager.advance(table, tokens, end)
    assert max(held) == window_blocks(3, 2) - 1 == 2
    assert len(table.held(0)) == 20


def test_a_prefix_ends_where_the_window_still_has_its_blocks() -> None:
    manager = windowed(num_blocks=5)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    manager.release(computed(manager, tokens))
    assert cached_head(manager, tokens) == 5
    for _ in range(2):  # evicts the two blocks that the request gave back first
        other = BlockTable()
        assert manager.start(other, Hits(count=0, blocks=([], [])), np.array([9, 9], np.int32), 2)
        manager.cover(other, 2)
    assert manager.pools[1].num_cached == 3
    assert [cached_head(manager, tokens[:end]) for end in (2, 4, 6, 8, 10)] == [0, 0, 3, 4, 5]


def test_longer_chunks_take_what_no_request_claims() -> None:
    manager, tokens = windowed(num_blocks=9), np.arange(40, dtype=np.int32)
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        assert manager.start(table, Hits(count=0, blocks=([], [])), tokens, 40)
    assert manager.pools[1].claimed == 2 * window_blocks(3, 2) == 6
    assert manager.reach(tables[0]) == (3 + 3) * 2
    manager.cover(tables[0], 12)
    assert manager.reach(tables[1]) == 3 * 2, "nothing is left beside what it claims"
    assert not manager.has_room(Hits(count=0, blocks=([], [])), 1, 40, 0)
    manager.advance(tables[0], tokens, 12)
    assert manager.reach(tables[1]) == (3 + 3) * 2


def test_a_model_whose_layers_all_have_windows_counts_the_blocks_of_the_first_group() -> None:
    manager, table = BlockManager((8,), 4, windows=(9,)), BlockTable()
    assert manager.reserve([(table, 10)])
    assert manager.num_alone(table) == 3


def stateful(num_slots: int, *, prefix_cache: bool = True) -> BlockManager:
    """One group that keeps everything, one with states that leave a snapshot every third block; blocks of 2."""
    return BlockManager((60, num_slots), 2, windows=(0, STATE_WINDOW), strides=(0, 3), prefix_cache=prefix_cache)


def test_a_prompt_leaves_snapshots_at_its_strides_and_at_its_last_block() -> None:
    manager, tokens = stateful(9), list(range(17))
    manager.release(computed(manager, tokens))
    assert [cached_head(manager, tokens[:end]) for end in range(17)] == [0] * 6 + [3] * 6 + [6] * 4 + [8]


def test_a_state_takes_two_slots_however_long_its_prompt_is() -> None:
    manager, tokens = stateful(STATE_SLOTS), np.arange(40, dtype=np.int32)
    table = BlockTable()
    assert manager.start(table, Hits(count=0, blocks=([], [])), tokens, 40)
    for end in (1, 2, 17, 18, 19, 40):
        manager.cover(table, end)
        assert len(table.held(1)) <= STATE_SLOTS
        assert table.ids[1, (end - 1) // 2] >= 0
        manager.advance(table, tokens, end)
    assert len(table.held(0)) == 20


def test_of_the_snapshots_that_decoding_leaves_the_last_one_stays() -> None:
    manager, tokens = stateful(9), list(range(12))
    table = computed(manager, tokens[:4])
    for end in range(5, 13):
        assert manager.reserve([(table, end)])
        manager.advance(table, np.array(tokens[:end], np.int32), end)
    manager.release(table)
    assert [cached_head(manager, tokens[:end]) for end in (2, 4, 6, 8, 10, 12)] == [1, 2, 2, 2, 2, 6]


def test_a_prompt_leaves_a_snapshot_where_it_parts_from_another_one() -> None:
    manager, head = stateful(9), [1] * 10
    manager.release(computed(manager, [*head, 2, 2, 2, 2]))
    assert cached_head(manager, [*head, 3, 3]) == 3
    manager.release(computed(manager, [*head, 3, 3, 3, 3]))
    assert cached_head(manager, [*head, 4, 4]) == 5
