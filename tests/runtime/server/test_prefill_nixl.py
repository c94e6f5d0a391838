"""Prefill apart with NIXL: answers have the bits of one server, whatever becomes of a read. With NIXL and a fake."""

import dataclasses
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.configs.serve import ServeConfig
from ingot.errors import UsageError
from ingot.runtime.server.kv_leases import HEAD
from ingot.runtime.server.nixl_blocks import NixlReader
from ingot.runtime.server.prefill_client import PrefillClient
from tests.runtime.server.apart import (
    PATH,
    PREFILL,
    SEEDED,
    SIZE,
    answer,
    body,
    check_fallback,
    decoding,
    fetched,
    nothing_leaks,
    offer_of,
)
from tests.runtime.server.fake_nixl import FakeNixl, fake_nixl
from tests.runtime.server.served import Served, ServeProcess, eventually, serving_engine
from tests.runtime.server.test_nixl_blocks import needs_nixl

pytestmark = pytest.mark.native
__all__ = ["nothing_leaks"]  # fixtures
BY_NIXL = dataclasses.replace(PREFILL, kv_transport="nixl", lease_memory=64 << 20, lease_timeout=6.0)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeNixl]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from fake_nixl(monkeypatch)


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test that asks for the fake finds it as it was made; others find what is installed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "fake" not in request.fixturenames:
            monkeypatch.delitem(sys.modules, "nixl", raising=False)
        yield
    if "fake" in request.fixturenames:
        fake = request.getfixturevalue("fake")
        fake.stopped, fake.began, fake.half = False, lambda _: None, lambda: None
        fake.lost.clear()


@pytest.fixture(scope="module")
def prefill(engine: Path, fake: FakeNixl) -> Iterator[Served]:
    with serving_engine(engine, BY_NIXL) as found:
        yield found


@pytest.fixture(scope="module")
def decode(engine: Path, prefill: Served) -> Iterator[Served]:
    with serving_engine(engine, decoding(prefill.url, kv_transport="nixl")) as found:
        yield found


def client_of(decode: Served) -> PrefillClient:
    """It asks servers that rest, too."""
    client = decode.service.prefill
    assert client is not None
    client._resting.clear()
    return client


def left_reads(decode: Served) -> int:
    """That nobody waits for."""
    reader = client_of(decode)._nixl
    assert reader is not None
    return len(reader._left)


def check_answer(prefill: Served, decode: Served, served: Served, asked: dict[str, Any]) -> None:
    """By one read."""
    client_of(decode)
    whole = (len(asked["prompt"]) - 1) // SIZE * SIZE
    before = fetched(decode)
    assert answer(decode, asked) == (answer(served, asked)[0], whole)
    assert fetched(decode) == before + 1


@pytest.mark.parametrize("more", [{"temperature": 0, "logprobs": 3}, SEEDED], ids=["greedy", "seeded"])
def test_the_answer_of_one_server(
    more: dict[str, Any], fake: FakeNixl, prefill: Served, decode: Served, served: Served
) -> None:
    reads: list[int] = []
    fake.began = lambda handle: reads.append(handle.own[1])
    check_answer(prefill, decode, served, body(len(more) + 600, **more))
    (nbytes,) = reads
    arena = prefill.service.leases._arena
    assert arena is not None
    assert eventually(lambda: not arena._taken, 10), "the piece comes back while the engine's thread sleeps"
    moved = decode.service.metrics.registry.get_sample_value("ingot_kv_moved_bytes_total", {"direction": "in"})
    assert moved
    assert moved % (nbytes - HEAD) == 0


@pytest.mark.slow
def test_servers_with_different_transports(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A decode server that wants NIXL says so; one that does not is served like any other."""
    with serving_engine(engine, decoding(prefill.url)) as own:
        check_answer(prefill, own, served, body(611, **SEEDED))
    with serving_engine(engine, PREFILL) as other:
        with serving_engine(engine, decoding(other.url, kv_transport="nixl")) as own:
            check_fallback(own, served, 612, "start both with --kv_transport nixl", caplog)
        with other.http() as http:
            wrong = offer_of(other, http, transport="mpi")
            assert (wrong.status_code, "transport" in wrong.text) == (400, True)


def others_take_the_lease(prefill: Served) -> None:
    """It is released, and its memory is that of another one, with other bytes."""
    leases = prefill.service.leases
    arena = leases._arena
    assert arena is not None
    ((lease_id, lease),) = tuple(leases._open.items())
    nbytes, address = lease.nbytes, lease.place["address"]
    del lease

    def take() -> None:
        other = leases.open(nbytes, "nixl")
        other.data[:] = 1
        taken.append(other.place["address"])
        prefill.loop.call_later(0.2, leases.release, other.lease_id)

    taken: list[object] = []
    prefill.loop.call_soon_threadsafe(leases.release, lease_id)
    assert eventually(lambda: not arena._taken, 10), "a thread that has computed the checksum lets go of the bytes"
    prefill.loop.call_soon_threadsafe(take)
    assert eventually(lambda: bool(taken), 10)
    assert taken == [address]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lease_whose_memory_is_used_again(
    when: str, fake: FakeNixl, prefill: Served, decode: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    assert eventually(lambda: not prefill.service.leases.nbytes, 10), "that of the test before is released"
    if when == "before":
        fake.began = lambda _: others_take_the_lease(prefill)
    else:
        fake.half = lambda: others_take_the_lease(prefill)
    client_of(decode)
    words = "given back before it was read" if when == "before" else "damaged"
    check_fallback(decode, served, 620 + len(when), words, caplog)


def test_a_connection_that_breaks(
    fake: FakeNixl, prefill: Served, decode: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    fake.half = fake.lose
    check_fallback(decode, served, 631, "NIXL_ERR_REMOTE_DISCONNECT", caplog)
    fake.half = lambda: None
    client_of(decode)
    check_fallback(decode, served, 632, "NIXL_ERR_BACKEND", caplog)
    fake.lost.clear()
    check_answer(prefill, decode, served, body(633, temperature=0))


@pytest.mark.slow
def test_bytes_that_do_not_come_in_time(
    engine: Path, fake: FakeNixl, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """They come later, into memory that is still there."""
    with serving_engine(engine, decoding(prefill.url, kv_transport="nixl", prefill_timeout=0.5)) as own:
        fake.stopped = True
        check_fallback(own, served, 641, "--prefill_timeout", caplog)
        assert left_reads(own) == 1
        fake.stopped = False
        check_answer(prefill, own, served, body(642, temperature=0))
        assert eventually(lambda: not any(each._waiting for each in tuple(fake.agents.values())), 10)
        check_answer(prefill, own, served, body(643, temperature=0))
        assert left_reads(own) == 0


@pytest.mark.slow
def test_a_client_that_leaves(engine: Path, fake: FakeNixl, prefill: Served) -> None:
    with serving_engine(engine, decoding(prefill.url, kv_transport="nixl")) as own:
        fake.stopped = True
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{own.url}{PATH}", json=body(651), timeout=0.5)
        assert eventually(lambda: not own.service.active, 10)
        assert fetched(own, "aborted") == 1
        assert eventually(own.is_empty, 10)
        assert eventually(lambda: not prefill.service.leases.nbytes, 10), "the lease is released"


def test_a_role_and_a_transport_go_together() -> None:
    with pytest.raises(UsageError, match="--role prefill or --role decode"):
        ServeConfig(kv_transport="nixl")
    with pytest.raises(UsageError, match="auto, nixl"):
        ServeConfig(role="prefill", kv_transport="mpi")


def real_servers(engine: Path, *options: object) -> ServeProcess:
    return ServeProcess(engine, ("--role", "prefill", "--kv_transport", "nixl", "--threads", 1, *options))


@needs_nixl
@pytest.mark.slow
def test_the_command_with_nixl(engine: Path, served: Served) -> None:
    """Both servers as users start them; then the first one is killed."""
    before = set(os.listdir("/dev/shm"))
    with real_servers(engine) as first:
        own = ("--role", "decode", "--prefill_url", first.url, "--prefill_min_tokens", 1, "--kv_transport", "nixl")
        with ServeProcess(engine, own) as second:
            for seed, cached, outcome in ((661, 149 // SIZE * SIZE, "fetched"), (662, 0, "computed here")):
                asked = body(seed, **SEEDED)
                found = httpx.post(f"{second.url}{PATH}", json=asked, timeout=60).json()
                assert found["choices"] == answer(served, asked)[0]
                assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
                metrics = httpx.get(f"{second.url}/metrics").text
                assert f'ingot_prompts_fetched_total{{outcome="{outcome}"}} 1.0' in metrics
                if cached:
                    first.process.kill()
                    first.wait()
    assert set(os.listdir("/dev/shm")) <= before


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("then", ["killed", "late"])
def test_a_prefill_server_stops_while_it_is_read(
    then: str, engine: Path, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TCP, where that server sends the bytes itself."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    begin, seconds = NixlReader._begin, 1 if then == "late" else 20
    with (
        real_servers(engine) as stopped,
        serving_engine(engine, decoding(stopped.url, kv_transport="nixl", prefill_timeout=seconds)) as own,
    ):
        assert answer(own, body(671))[1] > 0

        def begin_and_stop(reader: NixlReader, *place: Any) -> Any:
            stopped.process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            read = begin(reader, *place)
            if then == "killed":
                threading.Timer(0.3, stopped.process.kill).start()
            return read

        with monkeypatch.context() as stopping:
            stopping.setattr(NixlReader, "_begin", begin_and_stop)
            check_fallback(own, served, 672, "--prefill_timeout" if then == "late" else "NIXL", caplog)
        if then == "late":
            stopped.process.send_signal(signal.SIGCONT)
            seeds = itertools.count(700)
            assert eventually(lambda: answer(own, body(next(seeds)))[1] > 0 and left_reads(own) == 0, 20)


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("tls", ["all", "tcp,self"])
def test_a_prefill_server_is_killed_at_random_moments(
    tls: str, engine: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    rng, outcomes = random.Random(9), Counter[str]()
    for turn in range(4):
        with real_servers(engine) as killed, serving_engine(engine, decoding(killed.url, kv_transport="nixl")) as own:
            asked = [body(1000 * len(tls) + 10 * turn + place, 300, **SEEDED, max_tokens=6) for place in range(3)]
            threading.Timer(rng.uniform(0, 0.3), killed.process.kill).start()
            with ThreadPoolExecutor() as pool:
                found = list(pool.map(lambda each, own=own: answer(own, each)[0], asked))
            assert found == [answer(served, each)[0] for each in asked]
            assert eventually(own.is_empty, 10)
            outcomes += Counter({name: int(fetched(own, name)) for name in ("fetched", "computed here")})
    assert sum(outcomes.values()) == 12
