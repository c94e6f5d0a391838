"""What comes over a plain socket: requests that are not HTTP, and clients that end their side of the connection."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.server.served import Served, eventually, serving_engine
from tests.runtime.server.test_metrics import read

pytestmark = pytest.mark.native
TOKENIZE = b'{"prompt": "a"}'


@pytest.fixture(scope="module")
def own(engine: Path) -> Iterator[Served]:
    """A server whose counts are this file's alone."""
    with serving_engine(engine) as served:
        yield served


def connect(served: Served) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    connection.settimeout(30)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    got = b""
    while piece := connection.recv(65536):
        got += piece
    return got


def post(path: str, body: bytes, version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def counted(served: Served, route: str, status: int) -> float:
    return read(served).get(("ingot_requests_total", f"{route},{status}"), 0)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "ingot.server"]


BOTH = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (BOTH + SMUGGLED, 400, "Content-Length and Transfer-Encoding exclude each other"),
        (b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, 400, "HTTP/1.0 has no"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "conflicting"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "chunked"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "illegal request line"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "illegal header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000, 431, "too long"),
    ],
)
def test_what_is_not_http_is_refused_in_openais_form(
    own: Served, data: bytes, status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted(own, "other", status)
    with caplog.at_level(logging.INFO, "ingot.server"), connect(own) as connection:
        connection.sendall(data)
        answer = read_all(connection)
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_http")
    assert counted(own, "other", status) == before + 1
    (record,) = ours(caplog)
    said = vars(record)
    assert (record.getMessage(), said["status"], said["route"]) == ("malformed_http", status, "other")
    assert words in said["reason"]
    assert f"x-request-id: {said['request_id']}".encode() in head.lower()


def test_a_refusal_of_head_has_no_body(own: Served, caplog: pytest.LogCaptureFixture) -> None:
    with connect(own) as connection:
        connection.sendall(BOTH.replace(b"POST", b"HEAD"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"400", b"")
    assert not [record for record in caplog.records if record.name == "asyncio"], "the connection itself has no error"


def test_a_head_request_is_refused_without_a_body(own: Served) -> None:
    with connect(own) as connection:
        connection.sendall(BOTH.replace(b"POST", b"HEAD"))
        head, body = read_all(connection).split(b"\r\n\r\n", 1)
    assert (head.startswith(b"HTTP/1.1 400 "), body) == (True, b"")


def test_a_body_that_is_not_http_is_answered_and_counted_once(own: Served, caplog: pytest.LogCaptureFixture) -> None:
    before = counted(own, "/tokenize", 400)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n"
    with caplog.at_level(logging.INFO, "ingot.server"), connect(own) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 "), "the handler waits for the body"
        connection.sendall(b"2\r\n{ \r\nno chunk\r\n")
        answer = read_all(connection)
        assert eventually(lambda: bool(ours(caplog))), "a log line comes after its answer"
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: mine" in answer.lower()
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "malformed_http"
    assert eventually(lambda: counted(own, "/tokenize", 400) == before + 1)
    assert [(each.getMessage(), vars(each)["status"]) for each in ours(caplog)] == [("malformed_http", 400)]


LONG = {"prompt": "The prince", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(own: Served, stream: bool, version: str) -> None:
    """And the connection closes after it."""
    with own.slowly(0.0005), connect(own) as connection:
        connection.sendall(post("/v1/completions", json.dumps({**LONG, "stream": stream}).encode(), version))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    before, _, rest = answer.partition(b"HTTP/1.1 200 OK")
    assert before == (b"HTTP/1.1 102 Processing\r\n\r\n" if version == "1.1" else b"")
    assert b'"finish_reason":"length"' in rest
    assert (b"data: [DONE]" in rest) == stream


def test_requests_ahead_of_the_end_are_all_answered(own: Served) -> None:
    with own.slowly(0.0005), connect(own) as connection:
        get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(get + post("/v1/completions", json.dumps(LONG).encode()) + get)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"built_with"') == 2


def test_half_a_request_gets_no_answer(own: Served) -> None:
    with connect(own) as connection:
        connection.sendall(post("/tokenize", TOKENIZE)[:-3])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_and_leaves_later_is_cancelled(own: Served, stream: bool) -> None:
    before = len(own.runner.step_log())
    with own.slowly():
        connection = connect(own)
        connection.sendall(post("/v1/completions", json.dumps({**LONG, "max_tokens": 400, "stream": stream}).encode()))
        connection.shutdown(socket.SHUT_WR)
        assert eventually(lambda: own.runner.stats()["requests_running"] == 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leave with a reset
        connection.close()
        begin = time.monotonic()
        assert eventually(own.is_empty)
    assert time.monotonic() - begin < 5
    assert len(own.runner.step_log()) - before < 350, "it ran to its end"


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.mark.daily(1)
@pytest.mark.parametrize("busy", [0, 4], ids=["in the template", "before the template"])
def test_a_client_that_leaves_early_costs_nothing_more(own: Served, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed while the request is prepared, or waits for that; nothing is tokenized, and no step is run."""
    gate, rendered, tokenized = threading.Event(), [], []
    assert eventually(own.is_between_steps), "the last step of a test before"
    encode, steps, gone = Tokenizer.encode, len(own.runner.step_log()), "/v1/completions"

    def render(messages: list[dict[str, str]], *_: object, **__: object) -> list[int]:
        rendered.append(messages)
        assert gate.wait(60)
        return [5]

    def note(self: Tokenizer, text: str, **options: bool) -> list[int]:
        tokenized.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(own.service.templates, "encode", render)
    monkeypatch.setattr(Tokenizer, "encode", note)
    before = counted(own, gone, 499), counted(own, "/v1/chat/completions", 499)
    some = [connect(own) for _ in range(busy or 1)]
    for connection in some:
        connection.sendall(post("/v1/chat/completions", json.dumps(CHAT).encode()))
    assert eventually(lambda: len(rendered) == len(some))
    late = [connect(own) for _ in range(20 if busy else 0)]  # these wait for one of the threads
    for connection in late:
        connection.sendall(post(gone, json.dumps(LONG).encode()))
    assert eventually(lambda: len(own.service.active) == len(some) + len(late))
    for connection in late:
        connection.close()
    assert eventually(lambda: counted(own, gone, 499) == before[0] + len(late)), "seen in time"
    for connection in some:
        connection.close()
    assert eventually(lambda: counted(own, "/v1/chat/completions", 499) == before[1] + len(some)), "seen in time"
    gate.set()
    assert eventually(lambda: not own.service.active)
    assert not own.service.sequences
    assert tokenized == []
    assert len(own.runner.step_log()) == steps
