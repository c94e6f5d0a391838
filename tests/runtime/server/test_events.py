"""GET /kv/events and X-Session-Id: what routers hear of a server."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from ingot.runtime.server import events_api
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native

TEXT = "The old man went down to the river to look at his boat, and the boat was gone. " * 4


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that notices soon that a reader has left: it does when it sends something."""
    monkeypatch.setattr(events_api, "_SILENCE", 0.1)


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and data of each."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def keys_of(tokens: list[int], size: int) -> list[str]:
    """As a router computes them, by the words of docs/server.md."""
    key, found = hashlib.sha256(b"").digest(), []
    for begin in range(0, len(tokens) // size * size, size):
        key = hashlib.sha256(key + np.array(tokens[begin : begin + size], "<i4").tobytes()).digest()
        found.append(key.hex())
    return found


def test_a_router_knows_where_a_prompt_is(served: Served) -> None:
    with served.http() as http, http.stream("GET", "/kv/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        told = events(stream.iter_lines())
        name, first = next(told)
        assert name == "keys"
        with served.http() as other:
            tokens = other.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
            wanted = keys_of(tokens, first["tokens_per_block"])
            assert len(wanted) > 1
            assert not set(wanted) & set(first["keys"])
            asked = {"prompt": TEXT, "max_tokens": 2}
            answer = other.post("/v1/completions", json=asked).json()
            stored: set[str] = set()
            while not set(wanted) <= stored:
                name, changes = next(told)
                assert name == "changes"
                stored = stored.union(changes["stored"]) - set(changes["removed"])
            assert changes["number"] > first["number"]
            again = other.post("/v1/completions", json=asked).json()
    size = first["tokens_per_block"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(tokens) - 1) // size * size
    eventually(lambda: not served.runner.blocks.events.readers)
    with served.http() as http, http.stream("GET", "/kv/events") as stream:
        assert set(wanted) <= set(next(events(stream.iter_lines()))[1]["keys"])


def test_there_are_not_too_many_readers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    eventually(lambda: not served.runner.blocks.events.readers)
    monkeypatch.setattr(events_api, "MOST_READERS", 1)
    with served.http() as http, http.stream("GET", "/kv/events") as stream:
        next(stream.iter_lines())
        refused = http.get("/kv/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_readers")


def test_the_stream_ends_with_the_server_and_needs_a_key(engine: Any) -> None:
    config = dataclasses.replace(CONFIG, api_keys=("secret",))
    with serving_engine(engine, config) as own:
        assert httpx.get(f"{own.url}/kv/events").status_code == 401
        headers = {"authorization": "Bearer secret"}
        with httpx.stream("GET", f"{own.url}/kv/events", headers=headers, timeout=20) as stream:
            told = stream.iter_lines()
            next(told)
            own.service.draining = True
            assert "event: changes" not in list(told), "and that it ends at all"


@pytest.mark.parametrize(("given", "kept"), [("chat-7", True), ("a b", False), ("x" * 129, False)])
def test_the_session_is_repeated_and_logged(
    served: Served, given: str, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[str | None]:
        return [getattr(record, "session_id", None) for record in caplog.records if record.name == "ingot.server"]

    with caplog.at_level(logging.INFO, "ingot.server"), served.http() as http:
        answer = http.post("/tokenize", json={"prompt": "x"}, headers={"x-session-id": given})
        assert eventually(lambda: bool(logged()), 20), "the server logs a request when it has answered"
    assert answer.headers.get("x-session-id") == (given if kept else None)
    assert (given in logged()) == kept
