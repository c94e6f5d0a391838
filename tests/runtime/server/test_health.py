"""Readiness follows the tokens: a stuck step and a dead step loop are told, with the reason. Liveness is separate."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ingot.runtime.text_stream import TextStream
from ingot.runtime.tokenizer import Detokenizer
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native


@pytest.fixture
def own(engine: Path) -> Iterator[Served]:
    """A server for one test: what happens to it stays."""
    with serving_engine(engine, dataclasses.replace(CONFIG, stall_timeout=0.7)) as served:
        yield served


def test_a_stuck_step_is_told_and_forgiven(own: Served) -> None:
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        assert http.get("/health/ready").json() == {"status": "ready"}
        begin = time.monotonic()
        assert http.post("/debug/stall", json={"seconds": 1.5}).status_code == 202
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 4})
        assert eventually(lambda: http.get("/health/ready").status_code == 503)
        assert 0.6 < time.monotonic() - begin < 5, "stall_timeout is 0.7 s here"
        answer = http.get("/health/ready")
        assert "no step has ended for" in answer.json()["reason"]
        assert int(answer.headers["retry-after"]) > 0
        assert http.get("/health/live").status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200, "the loop turns"
        assert waiting.result().status_code == 200, "a request that waited is served"
        assert eventually(lambda: http.get("/health/ready").status_code == 200)
    assert own.is_empty()


def test_a_stuck_template_is_told_and_keeps_nobody_waiting(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(own.service.templates, "render", lambda *_, **__: str(gate.wait(20)))
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "timeout": 0.2}
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(http.post, "/v1/chat/completions", json=chat) for _ in range(3)]
        assert [one.result().status_code for one in some] == [408, 408, 408]
        time.sleep(0.9)
        assert http.get("/health/ready").status_code == 200, "a thread is left"
        assert http.post("/v1/completions", json={"prompt": "The prince", "max_tokens": 2}).status_code == 200
        assert http.post("/v1/chat/completions", json=chat).status_code == 408
        assert eventually(lambda: http.get("/health/ready").status_code == 503)
        assert "chat template or tokenizer are stuck" in http.get("/health/ready").json()["reason"]
        assert http.get("/health/live").status_code == 200
        gate.set()
        assert eventually(lambda: http.get("/health/ready").status_code == 200)
    assert eventually(lambda: own.is_empty() and not own.service.active)


def test_stuck_text_is_told(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda *given: push(*given) if gate.wait(20) else "")
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 2})
        assert eventually(lambda: http.get("/health/ready").status_code == 503)
        assert "the text of a token has not been ready for" in http.get("/health/ready").json()["reason"]
        gate.set()
        assert waiting.result().status_code == 200
        assert eventually(lambda: http.get("/health/ready").status_code == 200)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_text_loop_is_told_too(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.server.http_server._LAST_LOOK", 0.7)

    def broken(stream: TextStream) -> None:
        raise RuntimeError("a bug in the text loop")

    monkeypatch.setattr(TextStream, "take", broken)
    with own.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "The prince", "max_tokens": 500, "n": 2})
        assert answer.status_code == 500
        assert "a bug in the text loop" in answer.json()["error"]["message"]
        assert "the text loop has died" in http.get("/health/ready").json()["reason"]
    assert eventually(lambda: own.server.exit_code == 1, 10)


def test_an_idle_server_is_ready(own: Served) -> None:
    time.sleep(0.9)
    assert httpx.get(f"{own.url}/health").status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_step_loop_fails_its_requests_and_ends_the_server(
    own: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ingot.runtime.server.http_server._LAST_LOOK", 0.7)
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "The prince", "max_tokens": 500, "ignore_eos": True}
        running = pool.submit(http.post, "/v1/completions", json=body)
        assert eventually(lambda: own.runner.stats()["requests_running"] == 1)

        def broken(*arguments: object) -> None:
            raise RuntimeError("a bug in the scheduler")

        monkeypatch.setattr("ingot.runtime.executor.assemble", broken)
        answer = running.result(10)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "a bug in the scheduler" in answer.json()["error"]["message"]
        ready = http.get("/health/ready")
        assert ready.status_code == 503
        assert "the step loop has died" in ready.json()["reason"]
        late = http.post("/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "not_ready")
        assert http.get("/health/live").status_code == 200
    assert eventually(lambda: own.server.exit_code == 1, 10)
    assert "the step loop has died" in capfd.readouterr().err
