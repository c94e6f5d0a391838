"""Whatever happens to a prefill server, or on the way from it, answers have the same bits and nothing is kept."""

import asyncio
import dataclasses
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.runtime.server.prefill_api import PrefillApi
from ingot.runtime.server.prefill_client import PrefillClient
from tests.runtime.server.apart import (
    PATH,
    PREFILL,
    SEEDED,
    answer,
    body,
    check_fallback,
    decode,
    decoding,
    fetched,
    nothing_leaks,
    prefill,
)
from tests.runtime.server.served import Served, ServeProcess, eventually, serving_engine

pytestmark = pytest.mark.native
__all__ = ["decode", "nothing_leaks", "prefill"]  # fixtures


@pytest.mark.slow
def test_another_engine_is_refused_in_words(
    engine: Path, tmp_path: Path, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    build(BuildConfig(precision="w8", autotune=False), engine.parent / "checkpoint", tmp_path / "other")
    with serving_engine(tmp_path / "other", PREFILL) as other, serving_engine(engine, decoding(other.url)) as own:
        check_fallback(own, served, 71, "different engines", caplog)
        assert other.is_empty()


@pytest.mark.slow
def test_a_server_without_memory_for_leases(engine: Path, served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving_engine(engine, dataclasses.replace(PREFILL, lease_memory=100)) as full,
        serving_engine(engine, decoding(full.url)) as own,
    ):
        check_fallback(own, served, 72, "no memory for the blocks", caplog)
        check_fallback(own, served, 73, "no memory for the blocks", caplog)


@pytest.mark.slow
def test_a_lease_that_expires_before_it_is_fetched(
    engine: Path, prefill: Served, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(*_: object) -> None:
        for lease_id in tuple(prefill.service.leases._open):
            prefill.loop.call_soon_threadsafe(prefill.service.leases.release, lease_id)
        assert eventually(lambda: not prefill.service.leases.nbytes)

    monkeypatch.setattr("ingot.runtime.server.prefill_client.map_lease", late)
    with serving_engine(engine, decoding(prefill.url)) as own:
        check_fallback(own, served, 74, "expired or was released", caplog)


@pytest.mark.daily(1)
@pytest.mark.parametrize("what", ["bytes", "key"])
def test_damage_is_noticed(
    what: str,
    engine: Path,
    prefill: Served,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if what == "bytes":
        monkeypatch.setattr("ingot.runtime.server.prefill_api.checksum", lambda data: 1)
    else:
        monkeypatch.setattr("ingot.runtime.kv_transfer.BlockRange.last_key", "of others")
        monkeypatch.setattr("ingot.runtime.server.prefill_api.PrefillApi._offer", _other_offer)
    with serving_engine(engine, decoding(prefill.url)) as own:
        check_fallback(own, served, 75, "damaged" if what == "bytes" else "other blocks", caplog)


def _other_offer(api: Any, blocks: Any, lease: Any, crc: int) -> dict[str, Any]:
    return {"lease": lease.lease_id, "first_block": 0, "blocks": blocks.count, "bytes": lease.nbytes, "last_key": "x"}


@pytest.mark.slow
def test_nobody_listens_and_another_server_does(
    engine: Path, prefill: Served, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that does not answer is left alone for a while; the next one is asked at once."""
    monkeypatch.setattr("ingot.runtime.server.prefill_client._REST", 600)
    with serving_engine(engine, decoding("http://127.0.0.1:9")) as own:
        check_fallback(own, served, 76, "127.0.0.1:9", caplog)
        caplog.clear()
        check_fallback(own, served, 77, "", caplog)
        assert not caplog.records, "nothing is said each time"
    with serving_engine(engine, decoding("http://127.0.0.1:9", prefill.url)) as own:
        for seed in (78, 79, 80):
            assert answer(own, body(seed))[1] > 0
        assert fetched(own) == 3


@pytest.mark.slow
def test_keys_are_sent(engine: Path, served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with serving_engine(engine, dataclasses.replace(PREFILL, api_keys=("k1", "k2"))) as locked:
        with serving_engine(engine, decoding(locked.url, api_keys=("k2",))) as own, own.http("k2") as http:
            assert http.post(PATH, json=body(81)).status_code == 200
            assert fetched(own) == 1
        with serving_engine(engine, decoding(locked.url)) as own:
            check_fallback(own, served, 82, "API key", caplog)


def test_a_client_that_leaves_frees_both_sides(engine: Path, prefill: Served) -> None:
    """The prefill server is busy with another request's step; it forgets the prompt before it has computed it."""
    with serving_engine(engine, decoding(prefill.url)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{own.url}{PATH}", json=body(91), timeout=0.5)
        assert eventually(lambda: not own.service.active, 10)
        assert fetched(own, "aborted") == 1
        assert eventually(lambda: not prefill.service.active, 10)
        assert eventually(prefill.is_empty, 10)
        assert own.is_empty()


@pytest.mark.slow
def test_the_prefill_server_ends_a_prompt(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancelled there, as by an operator: the decode server computes it at once."""

    def cancel() -> None:
        assert eventually(lambda: any(each.startswith("kv-") for each in tuple(prefill.service.active)), 20)
        (found,) = [each for each in tuple(prefill.service.active) if each.startswith("kv-")]
        with prefill.http() as http:
            assert http.post(f"/v1/requests/{found}/cancel").status_code == 200

    with serving_engine(engine, decoding(prefill.url)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        ending = threading.Thread(target=cancel)
        ending.start()
        begin = time.monotonic()
        check_fallback(own, served, 92, "cancelled", caplog)
        assert time.monotonic() - begin < 10
        ending.join()


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_engine(engine, decoding(prefill.url, prefill_timeout=0.3)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        check_fallback(own, served, 93, "--prefill_timeout", caplog)
        assert eventually(lambda: not prefill.service.active, 10), "the prefill server hears of it"


async def _slow() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0.05)
        yield b"x"


async def _without_end() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0)
        yield bytes(1 << 16)


async def _ended() -> AsyncIterator[bytes]:
    yield b"x"


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("pieces", "words"),
    [(_slow, "--prefill_timeout"), (_without_end, "has more than"), (_ended, "ends 999 bytes too early")],
)
def test_a_server_that_sends_other_than_what_it_leases(
    pieces: Callable[[], AsyncIterator[bytes]],
    words: str,
    engine: Path,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bytes that come one by one keep a connection alive for ever, and an answer may be larger than what it leases."""

    async def other_bytes(api: PrefillApi, request: Request) -> StreamingResponse:
        return StreamingResponse(pieces(), headers={"content-length": "1000"} if pieces is _ended else None)

    monkeypatch.setattr("ingot.runtime.server.prefill_client.map_lease", lambda *_: None)
    monkeypatch.setattr(PrefillApi, "blocks", other_bytes)
    with (
        serving_engine(engine, PREFILL) as other,
        serving_engine(engine, decoding(other.url, prefill_timeout=0.5 if pieces is _slow else 30)) as own,
    ):
        check_fallback(own, served, 94, words, caplog)
        assert eventually(lambda: not other.connections, 10), "the prefill server hears of it"


class Killer:
    """Kills a server shortly before or after the n-th message to it."""

    def __init__(self, server: ServeProcess, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left, self._lock, self._kill, ask = (
            rng.randrange(9),
            threading.Lock(),
            server.process.kill,
            PrefillClient._ask,
        )
        delay = rng.choice((0, 0.001, 0.02, 0.1))

        def ask_and_kill(client: PrefillClient, *args: Any, **more: Any) -> bytes:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    threading.Timer(delay, self._kill).start() if delay else self._kill()
            return ask(client, *args, **more)

        monkeypatch.setattr(PrefillClient, "_ask", ask_and_kill)
        if rng.random() < 0.5:
            monkeypatch.setattr("ingot.runtime.server.prefill_client.map_lease", lambda *_: None)


@pytest.mark.slow
def test_a_prefill_server_is_killed_at_random_moments(engine: Path, served: Served) -> None:
    """While three clients ask; whatever becomes of a prompt, its answer is that of one server."""
    rng, outcomes = random.Random(8), Counter[str]()
    for turn in range(8):
        with (
            pytest.MonkeyPatch.context() as monkeypatch,
            ServeProcess(engine, ("--role", "prefill")) as killed,
            serving_engine(engine, decoding(killed.url)) as own,
        ):
            Killer(killed, rng, monkeypatch)
            asked = [body(100 * turn + place, 300, **SEEDED, max_tokens=6) for place in range(3)]
            with ThreadPoolExecutor() as pool:
                found = list(pool.map(lambda each, own=own: answer(own, each)[0], asked))
            assert found == [answer(served, each)[0] for each in asked]
            assert eventually(own.is_empty, 10)
            outcomes += Counter({name: int(fetched(own, name)) for name in ("fetched", "computed here")})
    assert sum(outcomes.values()) == 24
    assert len(outcomes) == 2, "some moments before the blocks came, some after"
