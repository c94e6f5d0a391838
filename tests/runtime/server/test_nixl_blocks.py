"""Memory that is read by NIXL: pieces of an arena, reads that end, fail, or are given up. With NIXL and a fake."""

import asyncio
import gc
import importlib.util
import inspect
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.runtime.server import nixl_blocks
from ingot.runtime.server.kv_leases import Leases, blocks_of
from ingot.runtime.server.nixl_blocks import Arena, NixlReader, Piece
from tests.runtime.server.fake_nixl import FakeAgent, FakeNixl, fake_nixl
from tests.runtime.server.served import eventually

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
URL = "http://one"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNixl]:
    yield from fake_nixl(monkeypatch)


@pytest.fixture(params=["fake", pytest.param("real", marks=needs_nixl)])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The real one over TCP, by which the arena sends: a reader in the same machine would look into its memory."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    if request.param == "fake":
        request.getfixturevalue("fake")
    return str(request.param)


@pytest.fixture
def arena(either: str) -> Iterator[Arena]:
    found = Arena(1 << 20)
    yield found
    found.close()


@pytest.fixture
def reader(either: str) -> Iterator[NixlReader]:
    found = NixlReader()
    yield found
    found.close()


def wanted() -> None:
    """Somebody waits."""


def read(reader: NixlReader, piece: Piece, url: str = URL) -> Any:
    agent, address = piece.place["agent"], piece.place["address"]
    assert isinstance(agent, str)
    assert isinstance(address, int)
    return reader.read(url, agent, address, len(piece.whole), wanted)


def filled(arena: Arena, nbytes: int, seed: int = 0) -> Piece:
    piece = arena.take(nbytes)
    piece.whole[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return piece


def test_bytes_come_whole(arena: Arena, reader: NixlReader) -> None:
    pieces = [filled(arena, nbytes, nbytes) for nbytes in (1, 64, 65, 100_000, 700_001)]
    with ThreadPoolExecutor(4) as pool:
        for piece, found in zip(pieces * 3, pool.map(lambda each: read(reader, each), pieces * 3), strict=True):
            np.testing.assert_array_equal(found, piece.whole)


def test_two_servers_and_one_that_was_started_again(arena: Arena, reader: NixlReader) -> None:
    other = Arena(1 << 16)
    mine, theirs = filled(arena, 1000, 1), filled(other, 1000, 2)
    np.testing.assert_array_equal(read(reader, mine), mine.whole)
    np.testing.assert_array_equal(read(reader, theirs, "http://two"), theirs.whole)
    np.testing.assert_array_equal(read(reader, theirs), theirs.whole)  # at the URL of the first
    np.testing.assert_array_equal(read(reader, mine, "http://three"), mine.whole)
    other.close()
    with pytest.raises(ConnectionError, match="NIXL"):
        read(reader, theirs)
    np.testing.assert_array_equal(read(reader, mine), mine.whole)


def test_a_piece_that_was_given_back_is_noticed(arena: Arena, reader: NixlReader) -> None:
    piece = filled(arena, 1000)
    piece.whole[:4] = np.frombuffer(b"name", np.uint8)
    length, place = len(piece.whole), piece.place
    assert blocks_of(read(reader, piece), "name") is not None
    piece.free()
    late = Piece(np.empty(length, np.uint8), place)
    assert blocks_of(read(reader, late), "name") is None


def test_pieces_never_overlap_and_come_back(arena: Arena) -> None:
    rng, held = random.Random(4), dict[int, Piece]()
    for turn in range(2000):
        if held and rng.random() < 0.5:
            number, piece = rng.choice(list(held.items()))
            assert (piece.whole == number % 251).all(), "somebody has written into it"
            del held[number]
            piece.free()
            continue
        try:
            held[turn] = arena.take(rng.randrange(1, 200_000))
        except OSError:
            assert held
            continue
        assert int(str(held[turn].place["address"])) % 64 == 0
        held[turn].whole[:] = turn % 251
    for piece in held.values():
        piece.free()
    held.clear()
    assert len(arena.take(1 << 20).whole) == 1 << 20


def test_bytes_that_somebody_holds_stay(arena: Arena) -> None:
    """A step may still write into a lease that has expired."""
    piece = arena.take(1 << 19)
    part = piece.whole[64:]
    piece.free()
    with pytest.raises(OSError, match="free"):
        arena.take((1 << 19) + 1)
    del part
    gc.collect()
    arena.take((1 << 19) + 1)


class GivenUpError(Exception):
    """Nobody waits any more."""


def give_up(reader: NixlReader, piece: Piece) -> None:
    def unwanted() -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        reader.read(URL, str(piece.place["agent"]), int(str(piece.place["address"])), len(piece.whole), unwanted)


def test_the_memory_of_a_read_stays_until_the_read_ends(fake: FakeNixl) -> None:
    arena, reader = Arena(1 << 20), NixlReader()
    fake.stopped = True
    piece = filled(arena, 5000)
    give_up(reader, piece)
    time.sleep(0.01)
    assert [len(each.buffer) for each in reader._left] == [5000]
    fake.stopped = False
    np.testing.assert_array_equal(read(reader, piece), piece.whole)
    assert eventually(lambda: len(read(reader, piece)) == 5000 and not reader._left, 10)
    reader.close()
    arena.close()


def test_reads_that_were_given_up_have_a_limit(fake: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_blocks, "_MOST_LEFT", 8000)
    arena, reader = Arena(1 << 20), NixlReader()
    fake.stopped = True
    piece = filled(arena, 5000)
    give_up(reader, piece)
    give_up(reader, piece)
    with pytest.raises(ConnectionError, match="10000 bytes of reads that were given up"):
        read(reader, piece)
    fake.stopped = False
    assert eventually(lambda: not any(each._waiting for each in tuple(fake.agents.values())), 10)
    np.testing.assert_array_equal(read(reader, piece), piece.whole)
    reader.close()
    arena.close()


def test_a_connection_that_breaks_is_made_anew(fake: FakeNixl) -> None:
    arena, reader = Arena(1 << 20), NixlReader()
    piece = filled(arena, 5000)
    fake.began = lambda _: fake.lose()
    with pytest.raises(ConnectionError, match="DISCONNECT"):
        read(reader, piece)
    with pytest.raises(ConnectionError, match="BACKEND"):
        read(reader, piece)
    fake.began = lambda _: None
    fake.lost.clear()
    np.testing.assert_array_equal(read(reader, piece), piece.whole)
    fake.half = fake.lose
    with pytest.raises(ConnectionError, match="NIXL"):
        read(reader, piece)
    reader.close()
    arena.close()


def test_other_metadata_and_addresses_are_refused(arena: Arena, reader: NixlReader) -> None:
    piece = filled(arena, 64)
    agent, address = str(piece.place["agent"]), int(str(piece.place["address"]))
    for wrong in ("no base64!", "YWJj"):
        with pytest.raises(ConnectionError, match="NIXL"):
            reader.read(URL, wrong, address, 64, wanted)
    with pytest.raises(ConnectionError, match="NIXL"):
        reader.read(URL, agent, address + (1 << 20), 64, wanted)
    np.testing.assert_array_equal(read(reader, piece), piece.whole)


def test_an_agent_that_fails_leases_nothing(fake: FakeNixl, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(1 << 20)
    fake.broken = RuntimeError("no device")
    arena.take(10)
    assert eventually(lambda: bool(caplog.records), 10)
    with pytest.raises(OSError, match="no device"):
        arena.take(10)
    arena.close()


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    for make in (NixlReader, lambda: Arena(100)):
        with pytest.raises(UsageError, match=r"needs NIXL(.|\n)*\[nixl\]"):
            make()


def test_nixl_without_ucx(fake: FakeNixl) -> None:
    fake.plugins = ["POSIX"]
    with pytest.raises(UsageError, match="plugins POSIX"):
        NixlReader()


def test_nothing_runs_after_the_end(either: str) -> None:
    before = threading.active_count()
    arena, reader = Arena(1 << 16), NixlReader()
    read(reader, filled(arena, 100))
    reader.close()
    arena.close()
    assert threading.active_count() == before
    with pytest.raises(OSError, match="ends"):
        arena.take(1)


@needs_nixl
def test_the_fake_has_what_nixl_has() -> None:
    from nixl import nixl_agent, nixl_agent_config

    assert {"enable_prog_thread", "backends"} <= set(inspect.signature(nixl_agent_config).parameters)
    for name, ours in inspect.getmembers(FakeAgent, inspect.isfunction):
        if not name.startswith("_"):
            takes = inspect.signature(ours).parameters
            inspect.signature(getattr(nixl_agent, name)).bind(*takes)


def test_a_lease_keeps_to_its_arena(arena: Arena) -> None:
    """Leases of both kinds count to one limit, and end alike."""

    async def use() -> None:
        leases = Leases(most_bytes=1000, seconds=60, arena=arena)
        near, far = leases.open(400, "auto"), leases.open(400, "nixl")
        assert (set(near.place), set(far.place)) == ({"path"}, {"agent", "address"})
        assert (len(near.data), len(far.data), leases.nbytes) == (400, 400, 800)
        leases.close()
        assert leases.nbytes == 0

    asyncio.run(use())
