"""The prefix cache tells which keys it gets and loses, whatever happens to its blocks."""

import hashlib
import random

import numpy as np

from ingot.runtime import block_events
from ingot.runtime.block_events import BlockEvents
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.block_table import BlockTable

SIZE = 16


def known(blocks: BlockManager) -> set[bytes]:
    """What the cache itself would find."""
    return set(blocks.pools[0]._sealed)


def test_readers_know_what_the_cache_knows() -> None:
    """After any requests, with a cache that evicts; also a reader who comes late."""
    draw, blocks = random.Random(3), BlockManager([12], SIZE)
    first = blocks.events.read()
    heard, late, late_heard = set(first.keys), None, set[bytes]()
    for turn in range(60):
        tokens = np.array([draw.randrange(3) for _ in range(draw.randrange(1, 90))], np.int32)
        table = BlockTable(draw.choice([b"", b"salt"]))
        hits = blocks.lookup(table, tokens, len(tokens) - 1)
        assert hits is not None
        assert blocks.start(table, hits, tokens, len(tokens))
        blocks.advance(table, tokens, len(tokens))
        if turn % 7 == 0:
            blocks.forget(table)
        blocks.release(table)
        if turn == 30:
            late = blocks.events.read()
            late_heard = set(late.keys)
            assert late_heard == known(blocks)
        for reader, keys in ((first, heard), (late, late_heard)):
            if reader is not None:
                changes = reader.fetch()
                assert changes.number == blocks.events.number
                assert not set(changes.stored) & set(changes.removed)
                keys |= set(changes.stored)
                keys -= set(changes.removed)
                assert keys == known(blocks)
    assert blocks.events.number > 60, "blocks were evicted"


def test_the_chain_is_what_the_documents_say() -> None:
    blocks, tokens, salt = BlockManager([8], SIZE), np.arange(40, dtype=np.int32), b"mine"
    table = BlockTable(salt)
    hits = blocks.lookup(table, tokens, 39)
    assert hits is not None
    blocks.start(table, hits, tokens, 40)
    blocks.advance(table, tokens, 40)
    key, wanted = hashlib.sha256(salt).digest(), []
    for begin in (0, 16):
        key = hashlib.sha256(key + tokens[begin : begin + SIZE].astype("<i4").tobytes()).digest()
        wanted.append(key)
    assert list(blocks.events.read().keys) == wanted


def test_a_slow_reader_is_lost_and_nobody_else() -> None:
    events = BlockEvents()
    slow, quick = events.read(), events.read()
    for number in range(block_events.MOST_PENDING + 1):
        events.stored(number.to_bytes(4, "little"))
        if number % 1000 == 0:
            quick.fetch()
    assert (slow.lost, quick.lost) == (True, False)
    slow.close()
    assert events.readers == {quick}


def test_without_a_prefix_cache_nothing_is_told() -> None:
    blocks, tokens = BlockManager([8], SIZE, prefix_cache=False), np.arange(40, dtype=np.int32)
    table = BlockTable()
    hits = blocks.lookup(table, tokens, 39)
    assert hits is not None
    blocks.start(table, hits, tokens, 40)
    blocks.advance(table, tokens, 40)
    assert not blocks.has_prefix_cache
    assert blocks.events.number == 0
