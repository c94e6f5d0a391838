"""Readiness follows the tokens: a stuck step and a dead thread are told, with the reason. Liveness is separate."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ingot.runtime.scheduler import Scheduler
from ingot.runtime.server.health import PrepareExecutor
from ingot.runtime.tokenizer import Detokenizer
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native


@pytest.fixture
def own(engine: Path) -> Iterator[Served]:
    """A server for one test: what happens to it stays."""
    with serving_engine(engine, dataclasses.replace(CONFIG, stall_timeout=0.7)) as served:
        yield served


def reason(http: httpx.Client) -> str:
    """Why the server is not ready; nothing if it is."""
    answer = http.get("/health/ready")
    told = str(answer.json().get("reason", ""))
    assert answer.status_code == (503 if told else 200)
    assert not told or int(answer.headers["retry-after"]) > 0
    return told


def is_ready(http: httpx.Client) -> bool:
    return not reason(http)


@pytest.mark.slow
def test_a_stuck_step_is_told_and_forgiven(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("ingot.runtime.server.debug.time", types.SimpleNamespace(sleep=lambda _: gate.wait(60)))
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        assert eventually(lambda: is_ready(http))
        begin = time.monotonic()
        assert http.post("/debug/stall", json={"seconds": 1.5}).status_code == 202
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 4})
        assert eventually(lambda: "no step has ended for" in reason(http))
        assert time.monotonic() - begin > 0.6, "stall_timeout is 0.7 s here"
        assert http.get("/health/live").status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200, "the loop turns"
        gate.set()
        assert waiting.result().status_code == 200, "a request that waited is served"
        assert eventually(lambda: is_ready(http))
    assert eventually(own.is_empty)


@pytest.mark.slow
def test_a_stuck_template_is_told_and_keeps_nobody_waiting(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(own.service.templates, "render", lambda *_, **__: str(gate.wait(60)))
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "timeout": 0.2}
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(http.post, "/v1/chat/completions", json=chat) for _ in range(3)]
        assert [one.result().status_code for one in some] == [408, 408, 408]
        time.sleep(0.9)
        assert eventually(lambda: is_ready(http)), "a thread is left"
        assert http.post("/v1/completions", json={"prompt": "The prince", "max_tokens": 2}).status_code == 200
        assert http.post("/v1/chat/completions", json=chat).status_code == 408
        assert eventually(lambda: "chat template or tokenizer are stuck" in reason(http))
        assert http.get("/health/live").status_code == 200
        gate.set()
        assert eventually(lambda: is_ready(http))
    assert eventually(lambda: own.is_empty() and not own.service.active)


@pytest.mark.slow
def test_stuck_text_is_told(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda *given: push(*given) if gate.wait(60) else "")
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 2})
        assert eventually(lambda: "the text of a token has not been ready for" in reason(http))
        gate.set()
        assert waiting.result().status_code == 200
        assert eventually(lambda: is_ready(http))


@pytest.mark.slow
def test_an_engine_thread_that_hangs_between_steps_is_told(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, schedule = threading.Event(), Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *given: schedule(*given) if gate.wait(60) else {})
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 2})
        assert eventually(lambda: "no step has ended for" in reason(http))
        assert http.get("/health/live").status_code == 200
        assert http.get("/metrics").status_code == 200
        gate.set()
        assert waiting.result().status_code == 200
        assert eventually(lambda: is_ready(http))
        own.service.draining = True
        assert reason(http) == "the server is shutting down"


def test_an_idle_server_is_ready(own: Served) -> None:
    time.sleep(0.9)
    assert eventually(lambda: httpx.get(f"{own.url}/health").status_code == 200)


def broken(*_: object) -> None:
    raise RuntimeError("a bug of ours")


@pytest.fixture(params=["ingot.runtime.step_loop.assemble", "ingot.runtime.text_stream.TextStream.new_tokens"])
def dying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Callable[[], None]]:
    """The thread that dies, and what makes it do so."""
    thread = {"assemble": "engine", "new_tokens": "text"}[request.param.rsplit(".", 1)[1]]
    return thread, lambda: monkeypatch.setattr(request.param, broken)


@pytest.mark.daily(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_fails_its_requests_and_is_told(
    own: Served, dying: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.runtime.server.http_server._LAST_LOOK", 600.0)
    thread, die = dying
    with own.slowly(), own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "The prince", "max_tokens": 500, "ignore_eos": True, "n": 2}
        running = pool.submit(http.post, "/v1/completions", json=body)
        assert eventually(lambda: own.runner.stats()["requests_running"] == 2)
        die()
        answer = running.result(60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "a bug of ours" in answer.json()["error"]["message"]
        assert f"the {thread} thread has died" in reason(http)
        late = http.post("/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        assert http.get("/health/live").status_code == 200


@pytest.mark.daily(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_ends_the_server(
    own: Served,
    dying: tuple[str, Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ingot.runtime.server.http_server._LAST_LOOK", 0.1)
    thread, die = dying
    die()
    with own.http() as http, contextlib.suppress(httpx.HTTPError):  # it may be gone before it has answered
        http.post("/v1/completions", json={"prompt": "The prince", "max_tokens": 500})
    assert eventually(lambda: own.server.exit_code == 1)
    assert f"the {thread} thread has died" in caplog.text


def test_a_pool_tells_overloaded_from_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ingot.runtime.server.health.time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    async def run() -> list[str | None]:
        pool, told, threads = PrepareExecutor(), [], threading.Semaphore(0)
        gates = [threading.Event() for _ in range(12)]

        def work(gate: threading.Event) -> None:
            threads.release()
            assert gate.wait(60)

        some = [pool.run(lambda gate=gate: work(gate)) for gate in gates]  # type: ignore[misc]
        for _ in range(4):
            await asyncio.to_thread(threads.acquire)
        late = threading.Event()
        for place, gate in enumerate(gates[:6]):  # one ends now and then: the others wait for their turn
            told.append(pool.trouble(4))
            clock[0] += 1
            if place == 4:
                some.append(pool.run(lambda: work(late)))
            gate.set()
            await some[place]
            await asyncio.to_thread(threads.acquire)  # the next one has begun
        told.append(pool.trouble(4))
        clock[0] += 2.5
        told.append(pool.trouble(4))  # the thread that began last has had less than 4 s
        clock[0] += 2
        told.append(pool.trouble(4))
        late.set()
        for gate in gates:
            gate.set()
        await asyncio.gather(*some)
        told.append(pool.trouble(4))
        pool.close()
        return told

    told = asyncio.run(run())
    assert told[:5] == [None] * 5, "nobody has waited for more than 4 s"
    assert "overloaded: a request has waited 5.0 s for its turn" in str(told[5])
    assert str(told[5]).endswith("and 4 wait")
    assert str(told[6]).endswith("and 3 wait")
    assert "overloaded: a request has waited 8.5 s" in str(told[7])
    assert "no request has been prepared for 4.5 s: chat template or tokenizer are stuck" in str(told[8])
    assert told[9] is None


def test_an_overloaded_server_says_so(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own.service._pool, "trouble", lambda seconds: f"overloaded: {seconds}")
    with own.http() as http:
        assert reason(http) == "overloaded: 0.7"
