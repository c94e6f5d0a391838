"""Blocks: free + used = total, every block has at most one holder, nothing leaks."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ingot.runtime.block_manager import BlockManager, BlockTable


class BlockMachine(RuleBasedStateMachine):
    """Tables grow and go in any order."""

    @initialize(
        num_blocks=st.integers(1, 12),
        tokens_per_block=st.integers(1, 5),
        seed=st.none() | st.integers(0, 9),
    )
    def start(self, num_blocks: int, tokens_per_block: int, seed: int | None) -> None:
        shuffle = None if seed is None else random.Random(seed)
        self.manager = BlockManager(num_blocks, tokens_per_block, shuffle=shuffle)
        self.tables: list[tuple[BlockTable, int]] = []

    @rule(tokens=st.integers(1, 30))
    def begin(self, tokens: int) -> None:
        table = BlockTable()
        free = self.manager.num_free
        granted = self.manager.reserve(table, tokens)
        assert granted == (self.manager.blocks_for(tokens) <= free)
        if granted:
            self.tables.append((table, tokens))
        else:
            assert table.count == 0

    @rule(which=st.integers(0, 99), more=st.integers(0, 8))
    def grow(self, which: int, more: int) -> None:
        if not self.tables:
            return
        table, tokens = self.tables[which % len(self.tables)]
        before = table.ids.tolist()
        if self.manager.reserve(table, tokens + more):
            self.tables[which % len(self.tables)] = (table, tokens + more)
        assert table.ids[: len(before)].tolist() == before

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        if self.tables:
            table, _ = self.tables.pop(which % len(self.tables))
            self.manager.release(table)
            assert table.count == 0

    @invariant()
    def balanced(self) -> None:
        held = [int(block) for table, _ in self.tables for block in table.ids]
        assert len(held) == len(set(held)) == self.manager.num_used
        assert self.manager.num_free + self.manager.num_used == self.manager.num_blocks
        assert sorted(held + list(self.manager.free_blocks())) == list(range(self.manager.num_blocks))
        for table, tokens in self.tables:
            assert table.count == self.manager.blocks_for(tokens)


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_shuffled_blocks_are_scattered() -> None:
    table = BlockTable()
    manager = BlockManager(64, 4, shuffle=random.Random(1))
    assert manager.reserve(table, 64 * 4)
    assert table.ids.tolist() != sorted(table.ids.tolist())
    assert sorted(table.ids.tolist()) == list(range(64))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager(9, 4).blocks_for(tokens) == blocks
