"""Readiness follows the tokens: a stuck step and a dead step loop are told, with the reason. Liveness is separate."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native


@pytest.fixture
def own(engine: Path) -> Iterator[Served]:
    """A server for one test: what happens to it stays."""
    with serving_engine(engine, dataclasses.replace(CONFIG, stall_timeout=1.0)) as served:
        yield served


def test_a_stuck_step_is_told_and_forgiven(own: Served) -> None:
    with own.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        assert http.get("/health/ready").json() == {"status": "ready"}
        begin = time.monotonic()
        assert http.post("/debug/stall", json={"seconds": 3}).status_code == 202
        waiting = pool.submit(http.post, "/v1/completions", json={"prompt": "The prince", "max_tokens": 4})
        assert eventually(lambda: http.get("/health/ready").status_code == 503)
        assert 0.9 < time.monotonic() - begin < 5, "stall_timeout is 1 s here"
        answer = http.get("/health/ready")
        assert "no step has ended for" in answer.json()["reason"]
        assert int(answer.headers["retry-after"]) > 0
        assert http.get("/health/live").status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200, "the loop turns"
        assert waiting.result().status_code == 200, "a request that waited is served"
        assert eventually(lambda: http.get("/health/ready").status_code == 200)
    assert own.is_empty()


def test_an_idle_server_is_ready(own: Served) -> None:
    time.sleep(1.2)
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
