"""What every answer carries and every line says: ids, quiet paths, the model's name, mistakes of ours."""

import asyncio
import dataclasses
import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.serve import ServeConfig
from ingot.errors import UsageError
from ingot.runtime.server import serve
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine
from tests.runtime.server.test_metrics import read

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def own(engine: Path) -> Iterator[Served]:
    """Two names, and little time for what is prepared."""
    config = dataclasses.replace(CONFIG, model_names=("first", "second"), request_timeout=0.5)
    with serving_engine(engine, config) as served:
        yield served


@pytest.mark.parametrize("given", ["mine-1.a:b_c", "x" * 128])
def test_the_clients_id_is_kept(own: Served, given: str) -> None:
    with own.http() as http:
        assert http.get("/version", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "a\tb"])
def test_an_id_that_could_spoil_a_log_is_replaced(own: Served, given: str) -> None:
    with own.http() as http:
        made = http.get("/version", headers={"x-request-id": given}).headers["x-request-id"]
    assert (made != given, len(made)) == (True, 24)


def test_probes_and_scrapes_have_no_lines(own: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot.server"), own.http() as http:
        before = read(own).get(("ingot_requests_total", "/health/live,200"), 0)
        for path in ("/", "/health", "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json"):
            assert http.get(path).status_code == 200
        assert http.get("/healthy").status_code == 404
        assert eventually(lambda: bool(caplog.records))
        assert read(own)["ingot_requests_total", "/health/live,200"] == before + 1
    assert [vars(record)["status"] for record in caplog.records if record.name == "ingot.server"] == [404]


def test_answers_carry_the_first_of_the_names(own: Served) -> None:
    with own.http() as http:
        for name in ("first", "second"):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert http.post("/v1/completions", json=body).json()["model"] == "first"
            assert http.get(f"/v1/models/{name}").json()["id"] == name
        manifest = own.runner.engine.manifest
        told = http.get("/version").json()["engine"]
        assert (told["target"], told["precision"]) == (manifest.target, manifest.precision)
        assert told["built_with"] == manifest.ingot_version


def test_options_of_streams_need_a_stream(own: Served) -> None:
    with own.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


def test_tokenizing_has_a_deadline_too(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = own.loop

    def never(*_: object) -> "asyncio.Future[Any]":
        return loop.create_future()

    monkeypatch.setattr(own.service._pool, "run", never)
    with own.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert "0.5 s" in answer.json()["error"]["message"]


def test_a_mistake_of_ours_is_an_answer_with_an_id(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(own.service, "run", broken)
    with own.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.headers["x-request-id"] == "mine"
    assert "a bug of ours" not in answer.text
    assert read(own)["ingot_requests_total", "/tokenize,500"] == 1


def test_requests_ahead_are_kept_only_so_far(own: Served) -> None:
    """While one is answered, some of what follows is read, to see the client leave; not all that it may send."""
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "timeout": 0.5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with own.slowly(), socket.create_connection(("127.0.0.1", int(own.url.rsplit(":", 1)[1]))) as client:
        client.sendall(head + body)
        assert eventually(lambda: bool(own.service.active))
        client.setblocking(False)
        sent = 0
        for _ in range(10_000):
            try:
                sent += client.send(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
            except BlockingIOError:
                break
        assert eventually(lambda: any(each.flow.read_paused for each in own.connections))
        kept = max(len(each.conn.trailing_data[0]) for each in own.connections)
        assert 64 << 10 <= kept < 1 << 20


def test_what_is_said_before_it_listens(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of generation_config.json that are not followed, and a server that anybody may use."""
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    (copy / "generation_config.json").write_text('{"num_beams": 4}')
    said: list[str] = []

    class Opened:
        def __enter__(self) -> "Opened":
            return self

        def __exit__(self, *_: object) -> None: ...

    def stop(*_: object, **__: object) -> None:
        raise UsageError("far enough")

    monkeypatch.setattr(serve, "set_up_logs", stop)
    config = ServeConfig(host="0.0.0.0", chat_template="chatml")
    with pytest.raises(UsageError, match="far enough"):
        serve.serve(copy, Opened, config, said.append, lambda host, port: None)  # type: ignore[arg-type]
    assert len(said) == 2
    assert "ingot does not apply num_beams=4" in said[0]
    assert "may use the engine: no --api_key is set" in said[1]
