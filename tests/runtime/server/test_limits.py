"""What ends or refuses a request without touching the others: limits, deadlines, cancellation, hang-ups, keys."""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native
LONG: dict[str, Any] = {"model": "tiny", "prompt": "The prince", "max_tokens": 500, "ignore_eos": True}
KEYS = ("first-key", "second-key", "zw\u00f6lf", "\u5341\u4e8c")


@pytest.fixture(scope="module")
def strict(engine: Path) -> Iterator[Served]:
    """Small limits, two keys, one foreign page."""
    config = dataclasses.replace(
        CONFIG, api_keys=KEYS, max_queue=1, max_body_bytes=2000, cors_origins=("https://chat.example",)
    )
    with serving_engine(engine, config, max_batch_size=2) as served:
        yield served


@pytest.fixture(scope="module")
def impatient(engine: Path) -> Iterator[Served]:
    """Waits for nobody; what is sent to it is sent at once."""
    config = dataclasses.replace(CONFIG, body_timeout=0.4, write_timeout=0.5)
    with serving_engine(engine, config) as served:
        yield served


def running(served: Served, count: int = 1) -> bool:
    return eventually(lambda: served.runner.stats()["requests_running"] >= count)


def open_socket(
    served: Served, body: dict[str, Any], *, key: str = "", path: str = "/v1/completions", request_id: str = "x"
) -> socket.socket:
    """A request on a plain socket, whose answer nobody has read yet."""
    port = int(served.url.rsplit(":", 1)[1])
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_cancelled(served: Served, stream: bool) -> None:
    before = len(served.runner.step_log())
    with served.slowly():
        connection = open_socket(served, {**LONG, "stream": stream, "n": 2})
        assert running(served, 2)
        connection.close()
        assert eventually(served.is_empty)
    assert len(served.runner.step_log()) - before < 450, "it ran to its end"


def test_cancel_by_either_id(served: Served) -> None:
    with served.slowly(), served.http() as http, concurrent.futures.ThreadPoolExecutor() as pool:
        whole = pool.submit(http.post, "/v1/completions", json=LONG, headers={"x-request-id": "mine-1"})
        assert running(served)
        assert http.post("/v1/requests/mine-1/cancel").json() == {"id": "mine-1", "cancelled": True}
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["x-should-retry"] == "false"
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as pieces:
            lines = pieces.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            http.post(f"/v1/requests/{first['id']}/cancel").raise_for_status()
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
        gone = http.post("/v1/requests/mine-1/cancel")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    assert eventually(served.is_empty)


def test_nobody_cancels_for_another_key(strict: Served) -> None:
    with (
        strict.slowly(),
        strict.http(KEYS[0]) as mine,
        strict.http(KEYS[1]) as other,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        whole = pool.submit(mine.post, "/v1/completions", json=LONG, headers={"x-request-id": "mine"})
        assert running(strict)
        (answer_id,) = strict.service.active
        for request_id in ("mine", answer_id):
            assert other.post(f"/v1/requests/{request_id}/cancel").status_code == 404
        assert mine.post(f"/v1/requests/{answer_id}/cancel").status_code == 200
        assert whole.result().status_code == 499
    assert eventually(strict.is_empty)


def test_deadlines(served: Served) -> None:
    with served.slowly(), served.http() as http:
        late = http.post("/v1/completions", json={**LONG, "timeout": 0.05})
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert late.headers["x-should-retry"] == "false"
        too_much = http.post("/v1/completions", json={**LONG, "timeout": 6000})
        assert (too_much.status_code, too_much.json()["error"]["param"]) == (400, "timeout")
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 1, "timeout": 600}).status_code == 200
    with served.slowly(), served.client() as client, pytest.raises(openai.APIError, match="did not end within"):
        list(
            client.completions.create(
                model="tiny", prompt="The prince", max_tokens=500, stream=True, extra_body={"timeout": 0.05}
            )
        )
    assert eventually(served.is_empty)


@pytest.mark.slow
def test_a_slow_reader_stalls_nobody(served: Served) -> None:
    slow = open_socket(served, {**LONG, "stream": True, "logprobs": 20, "n": 2})
    assert eventually(lambda: bool(served.service.active)), "and so it stays, more is sent than fits its buffers"
    with served.http() as http:
        quick = http.post("/v1/completions", json={**LONG, "max_tokens": 8, "ignore_eos": False})
    assert quick.status_code == 200
    assert eventually(served.is_empty), "a client that does not read must not hold blocks"
    assert served.service.active
    with slow, slow.makefile("rb") as answer:  # all of it is still there for the slow one
        assert any(line == b"data: [DONE]\n" for line in answer)


def test_a_silent_stream_says_that_it_lives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("ingot.runtime.server.debug.time", types.SimpleNamespace(sleep=lambda _: gate.wait(60)))
    monkeypatch.setattr("ingot.runtime.server.response.KEEP_ALIVE", 0.2)
    with served.http() as http:
        http.post("/debug/stall", json={"seconds": 1})
        begin, signs = time.monotonic(), 0
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as pieces:
            for line in pieces.iter_lines():
                signs += line == ": waiting"
                if signs == 3:
                    gate.set()
    assert 3 <= signs <= (time.monotonic() - begin) / 0.2, "it is silent in between"
    assert line == "data: [DONE]" or not line


@pytest.mark.slow
def test_who_never_reads_is_cut_off(impatient: Served, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [each.getMessage() for each in caplog.records if getattr(each, "request_id", None) == "deaf"]

    with caplog.at_level(logging.INFO, "ingot.server"):
        deaf = open_socket(impatient, {**LONG, "stream": True, "logprobs": 20, "n": 3}, request_id="deaf")
        assert eventually(lambda: bool(said()))
    assert said() == ["client does not read"]
    assert eventually(lambda: impatient.is_empty() and not impatient.service.active)
    deaf.close()


def test_a_full_queue_says_when_to_come_back(strict: Served) -> None:
    with strict.slowly(), strict.http(KEYS[1]) as http, concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(http.post, "/v1/completions", json=LONG, headers={"x-request-id": "s"}) for _ in range(3)]
        assert eventually(lambda: strict.service.sequences == 3)
        full = http.post("/v1/completions", json=LONG)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(full.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            _client(strict, KEYS[0]).completions.create(model="tiny", prompt="a")
        never = http.post("/v1/completions", json={**LONG, "n": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        batch = http.post("/v1/completions", json={"prompt": ["a"] * 4})
        assert (batch.status_code, batch.json()["error"]["param"]) == (400, "prompt")
        assert "4 sequences (4 prompts x n 1)" in batch.json()["error"]["message"]
        both = [{"prompt": ["a"] * 3, "n": 2}, {"prompt": ["a"] * 2, "n": 3}]
        told = [http.post("/v1/completions", json=body).json()["error"]["param"] for body in both]
        assert told == ["prompt", "n"]
        http.post("/v1/requests/s/cancel")
        assert [one.result().status_code for one in some] == [499, 499, 499]
        assert eventually(lambda: not strict.service.sequences)
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def _client(served: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def test_bodies_have_limits(strict: Served, impatient: Served) -> None:
    with strict.http(KEYS[0]) as http:
        large = http.post("/v1/completions", json={"prompt": "a" * 3000})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        chunked = http.post("/v1/completions", content=iter([b"a" * 1500, b"a" * 1500]))
        assert chunked.status_code == 413
        for size, status in ((2000, 200), (2001, 413)):
            body = b'{"prompt": "a"}'.ljust(size)
            assert http.post("/tokenize", content=body).status_code == status
            assert http.post("/tokenize", content=iter([body[:1000], body[1000:]])).status_code == status
    port = int(impatient.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert half.recv(1000).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.settimeout(60)
        silent.sendall(b"POST /v1/com")
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1000) == b"", "a head that does not come is not waited for"


@pytest.mark.slow
def test_keys_open_the_door(strict: Served) -> None:
    for key in (None, "wrong", KEYS[0][:-1], KEYS[0] + "x", "ké"):
        headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
        shut = httpx.post(f"{strict.url}/v1/completions", json=LONG, headers=headers)  # type: ignore[arg-type]
        assert (shut.status_code, shut.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{strict.url}/v1/models").status_code == 401
    assert httpx.post(f"{strict.url}/tokenize", json={"prompt": "a"}).status_code == 401
    for path in ("/health/live", "/health/ready", "/version", "/metrics"):
        assert httpx.get(f"{strict.url}{path}").status_code == 200
    for key in KEYS[:2]:
        assert [model.id for model in _client(strict, key).models.list()] == ["tiny"]


def test_keys_open_the_door_as_bytes_and_in_either_header(strict: Served) -> None:
    client = strict.http()

    def status(headers: dict[bytes, bytes]) -> int:
        return client.get("/v1/models", headers=headers).status_code

    for good in (*(key.encode() for key in KEYS), KEYS[2].encode("latin-1")):
        assert status({b"authorization": b"Bearer " + good}) == 200
        assert status({b"authorization": b"bearer  " + good}) == 200
        assert status({b"x-api-key": good}) == 200
        assert status({b"x-api-key": good, b"authorization": b"Bearer wrong"}) == 200
        assert status({b"authorization": good}) == 401
        assert status({b"authorization": b"Basic " + good}) == 401
        assert status({b"x-api-key": good[:-1]}) == 401
        assert status({b"x-api-key": b"Bearer " + good}) == 401
    assert status({b"x-api-key": b""}) == 401
    client.close()


def test_other_pages_may_call_only_where_asked(strict: Served, served: Served) -> None:
    for server, allowed in ((strict, "https://chat.example"), (served, None)):
        headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
        assert answer.headers.get("access-control-allow-origin") == allowed
        plain = httpx.get(f"{server.url}/health/live", headers=headers)
        exposed = plain.headers.get("access-control-expose-headers", "").lower().split(", ")
        assert exposed == (["x-request-id", "x-session-id", "retry-after", "x-should-retry"] if allowed else [""])


@pytest.mark.daily(1)
@pytest.mark.parametrize("path", ["/v1/models/", "/v1/chat/completions/", "/health/live/", "/nowhere/"])
def test_nobody_is_sent_elsewhere(served: Served, path: str) -> None:
    """Least of all to where a Host header says."""
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{served.url}{path}", headers={"host": "evil.example"})
        assert answer.status_code in (404, 405)
        assert "location" not in answer.headers
        assert "evil" not in answer.text
    absolute = httpx.get(f"{served.url}/v1/embeddings", headers={"host": "evil.example/v1/files"})
    assert "gives no embeddings" in absolute.text


@pytest.mark.parametrize(("field", "value"), [("top_p", 1e-300), ("logit_bias", {"99999999": 1})])
def test_what_only_the_engine_can_judge_is_refused_by_name(served: Served, field: str, value: object) -> None:
    with served.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.slow
def test_one_request_fails_and_the_others_go_on(served: Served) -> None:
    """Every token but the last is banned by name, then that one too."""
    vocab = served.runner.model_info.vocab_size
    words = [f"{served.service.tokenizer.token_text(token)}" for token in range(vocab)]
    bad = {
        "prompt": "a",
        "max_tokens": 4,
        "bad_words": [word for word in words if word.strip()],
        "ignore_eos": True,
        "min_tokens": 4,
        "stop_token_ids": list(range(vocab)),
    }
    results: list[httpx.Response] = []
    with served.http() as http:
        thread = threading.Thread(target=lambda: results.append(http.post("/v1/completions", json=LONG)))
        thread.start()
        assert running(served)
        failed = http.post("/v1/completions", json=bad)
        assert failed.status_code == 400
        assert "leave no token to choose" in failed.json()["error"]["message"]
        thread.join()
    assert results[0].status_code == 200
    assert eventually(served.is_empty)


@pytest.mark.parametrize(
    "ahead", [b"\r\n", b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 3], ids=["CRLF", "requests"]
)
def test_who_sends_ahead_is_seen_to_leave(served: Served, ahead: bytes) -> None:
    before = len(served.runner.step_log())
    with served.slowly():
        connection = open_socket(served, {**LONG, "n": 2})
        assert running(served, 2)
        connection.sendall(ahead)
        time.sleep(0.05)
        connection.close()
        assert eventually(served.is_empty)
    assert len(served.runner.step_log()) - before < 450, "it ran to its end"


def test_requests_sent_ahead_are_answered_in_turn(served: Served) -> None:
    with open_socket(served, {**LONG, "max_tokens": 3}) as connection:
        connection.settimeout(20)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while b'"live"' not in got:
            got += connection.recv(10_000)
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.index(b"text_completion") < got.index(b'"engine"') < got.index(b'"live"')


def test_silence_after_the_first_request_is_cut_too(impatient: Served) -> None:
    port = int(impatient.url.rsplit(":", 1)[1])
    head = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
    for begin in (head + b"\r\nPOST /v1/comp", head + b"Content-Length: 100000\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(0.05)
            connection.sendall(begin)

            def is_cut(connection: socket.socket = connection) -> bool:
                try:
                    connection.sendall(b"a")  # a little now and then
                    return connection.recv(1000) == b""
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            assert eventually(is_cut)


def test_any_answer_must_be_read(impatient: Served) -> None:
    """Not only those of the engine."""
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(impatient.url.rsplit(":", 1)[1])))
        deaf.setblocking(False)

        def is_cut() -> bool:
            try:
                deaf.send(request * 100)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            return False

        assert eventually(is_cut)


def test_noise_after_an_early_answer(strict: Served, caplog: pytest.LogCaptureFixture) -> None:
    with open_socket(strict, {"prompt": "a" * 3000}, key=KEYS[0]) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    port = int(strict.url.rsplit(":", 1)[1])
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + b"1000\r\n" + b"a" * 4096 + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"noise\r\n\r\n")
            while connection.recv(1000):
                pass
    assert [record for record in caplog.records if record.exc_info] == []
