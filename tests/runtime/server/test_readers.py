"""Clients that read slowly: what they miss, which is nothing, and when they are given up."""

import asyncio
import dataclasses
import http.client
import json
import re
import types
from pathlib import Path

import pytest

from ingot.runtime.server.connection import connection
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.request_log import RequestLog
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine
from tests.runtime.server.test_limits import LONG, open_socket

pytestmark = pytest.mark.native


@pytest.mark.slow
def test_a_reader_that_pauses_and_goes_on_misses_nothing(served: Served) -> None:
    """The server stops writing while the client does not read, and goes on when it does."""
    body = {**LONG, "max_tokens": 300, "temperature": 0, "logprobs": 20, "n": 4}
    with served.http() as client:
        whole = client.post("/v1/completions", json=body).json()
    with open_socket(served, {**body, "stream": True}) as slow:
        slow.settimeout(60)
        assert eventually(lambda: any(each.flow.write_paused for each in served.connections)), "it fits its buffers"
        answer = http.client.HTTPResponse(slow)
        answer.begin()
        got = answer.read()
    texts = [""] * 4
    for line in re.findall(rb"data: (\{.*)\n", got):
        (choice,) = json.loads(line)["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert b"data: [DONE]" in got


def test_only_a_pause_that_lasts_is_the_end() -> None:
    """`write_timeout` counts from the latest moment at which the client stopped reading."""
    loop = asyncio.new_event_loop()
    log = RequestLog(Metrics(), lines=False)
    kind = connection(head_seconds=7, write_seconds=5, request_log=log)
    assert (kind.head_timeout, kind.write_timeout) == (7, 5)
    slow = kind.__new__(kind)
    slow.loop, slow.flow = loop, types.SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)  # type: ignore[assignment]
    slow.pause_writing()
    first = slow._deaf
    assert first is not None
    assert 4 < first.when() - loop.time() <= 5
    slow.resume_writing()
    assert first.cancelled()
    slow.pause_writing()
    assert slow._deaf is not first
    assert slow._deaf is not None
    assert not slow._deaf.cancelled()
    loop.close()


def test_limits_reach_the_connections(engine: Path) -> None:
    with serving_engine(engine, dataclasses.replace(CONFIG, body_timeout=0.4, write_timeout=0.5)) as served:
        kind = served.server.config.http
    assert (kind.head_timeout, kind.write_timeout) == (0.4, 0.5)  # type: ignore[union-attr]
