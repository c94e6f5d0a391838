"""`ingot bench serve --url`: its numbers on servers whose times are known, and what it makes of odd ones."""

import asyncio
import http.server
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ingot.bench.http_client import Answer, Client
from ingot.bench.load_test import LoadReport, OnlineOptions, OnlineReport, _Bench, bench_online

TTFT = (0.5, 0.1, 0.9, 0.3, 0.7)  # seconds, in turn
GAPS = (0.01, 0.03, 0.08)


class KnownTimes:
    """In place of a Client: the i-th answer has its first piece after TTFT[i], then gaps of GAPS[i]."""

    def __init__(self) -> None:
        self._count = itertools.count(-1)  # the first one counts the words of a prompt
        self.bodies: list[dict[str, Any]] = []

    async def get_json(self, path: str) -> Any:
        return {"data": [{"id": "known"}]}

    async def stream(self, path: str, body: dict[str, Any], timeout: float) -> Answer:
        place = next(self._count)
        self.bodies.append(body)
        start, first, gap = 100.0 * place, TTFT[place % len(TTFT)], GAPS[place % len(GAPS)]
        pieces = [start + first + gap * each for each in range(5)]
        return Answer(start=start, pieces=pieces, end=pieces[-1] + 0.25, prompt_tokens=400, tokens=9)


def measure(**options: Any) -> LoadReport:
    async def run() -> OnlineReport:
        asked = OnlineOptions(url="http://x", **options)
        return await _Bench(asked, lambda *_: None, KnownTimes()).run()  # type: ignore[arg-type]

    (report,) = asyncio.run(run()).runs
    return report


def test_percentiles_of_known_times() -> None:
    report = measure(concurrencies=(1,), num_requests=30, ttft_ms=600, tpot_ms=20)
    first = np.array([1e3 * TTFT[place % 5] for place in range(30)])
    gaps = np.array([1e3 * GAPS[place % 3] for place in range(30)])
    tpot = gaps * 4 / 8  # five pieces hold nine tokens
    whole = first + 4 * gaps + 250
    for found, expected in (
        (report.ttft, first),
        (report.tpot, tpot),
        (report.itl, np.repeat(gaps, 4)),
        (report.e2e, whole),
    ):
        assert found is not None
        assert found.mean == pytest.approx(expected.mean())
        assert [found.p50, found.p90, found.p99] == pytest.approx(np.percentile(expected, [50, 90, 99]).tolist())
    good = (first <= 600) & (tpot <= 20)
    assert report.good_share == pytest.approx(good.mean())
    assert report.good_requests_per_second == pytest.approx(good.sum() / report.seconds)
    assert (report.requests, report.failed, report.output_tokens_mean, report.prompt_tokens_mean) == (30, 0, 9, 400)


def answered(start: float, *pieces: float, tokens: int = 0, error: str | None = None) -> Answer:
    """Times relative to 1,000 s."""
    times = [1000 + each for each in pieces]
    return Answer(start=1000 + start, pieces=times, end=times[-1] + 0.5, prompt_tokens=10, tokens=tokens, error=error)


def reported(answers: list[Answer], planned: list[float], seconds: float, **options: Any) -> LoadReport:
    asked = OnlineOptions(url="http://x", rates=(1.0,), num_requests=len(answers), **options)
    bench = _Bench(asked, lambda *_: None, KnownTimes())  # type: ignore[arg-type]
    return bench._report("a load", None, answers, [1000 + each for each in planned], seconds)


def test_times_count_from_the_planned_arrival() -> None:
    """The second request was sent two seconds late: that is the server's fault, and no request may hide it."""
    report = reported(
        [answered(0, 0.25, 0.5, tokens=2), answered(3, 3.25, 3.5, tokens=2)], [0, 1], 4.0, ttft_ms=500, tpot_ms=1e9
    )
    assert report.samples["ttft"] == pytest.approx([250, 2250])
    assert report.samples["e2e"] == pytest.approx([1000, 3000])
    assert report.samples["tpot"] == pytest.approx([250, 250])
    assert (report.good_share, report.good_requests_per_second) == (0.5, 0.25)


def test_an_open_loop_plans_arrivals_whatever_the_server_does() -> None:
    """The event loop is busy for 0.3 s when all four should be sent."""

    class Busy(KnownTimes):
        async def stream(self, path: str, body: dict[str, Any], timeout: float) -> Answer:
            if next(self._count) == 0:
                time.sleep(0.3)
            now = time.perf_counter()
            return Answer(start=now, pieces=[now], end=now, prompt_tokens=1, tokens=1)

    async def run() -> OnlineReport:
        asked = OnlineOptions(url="http://x", rates=(1000.0,), num_requests=4)
        return await _Bench(asked, lambda *_: None, Busy()).run()  # type: ignore[arg-type]

    (report,) = asyncio.run(run()).runs
    assert min(report.samples["ttft"]) > 250, "those that waited, too"


def test_failed_requests_are_neither_good_nor_counted() -> None:
    answers = [answered(0, 0.25, 1.25, tokens=5), answered(0, 0.25, tokens=7, error="gone")]
    report = reported(answers, [0, 0], 2.0, ttft_ms=1e9, tpot_ms=1e9)
    assert (report.requests, report.failed, report.errors) == (2, 1, {"gone": 1})
    assert (report.good_share, report.good_requests_per_second, report.requests_per_second) == (0.5, 0.5, 0.5)
    assert (report.output_tokens_per_second, report.output_tokens_mean) == (2.5, 5)
    assert report.samples["tpot"] == pytest.approx([250])
    assert reported(answers, [0, 0], 2.0, ttft_ms=1e9, tpot_ms=249).good_share == 0
    assert reported(answers, [0, 0], 2.0, ttft_ms=249, tpot_ms=1e9).good_share == 0


def test_prompts_have_as_many_tokens_as_asked_for() -> None:
    """The server counts 400 tokens in 200 words: 100 tokens are 50 words."""
    client = KnownTimes()

    async def run() -> OnlineReport:
        asked = OnlineOptions(url="http://x", concurrencies=(1,), num_requests=2, input_len=100, output_len=7)
        return await _Bench(asked, lambda *_: None, client).run()  # type: ignore[arg-type]

    asyncio.run(run())
    assert [len(body["prompt"].split()) for body in client.bodies] == [200, 50, 50]
    assert [body["max_tokens"] for body in client.bodies] == [2, 7, 7]


class Raw(http.server.ThreadingHTTPServer):
    """Answers every request with the same pieces, one after the other."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RawHandler)
        self.pieces: list[bytes] = []


class RawHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send([b'{"data": [{"id": "raw"}]}'])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Raw)
        self._send(self.server.pieces)

    def _send(self, pieces: list[bytes]) -> None:
        self.send_response(200)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
            time.sleep(0.03)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def raw_server() -> Iterator[tuple[str, list[bytes]]]:
    with Raw() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", server.pieces
        server.shutdown()
        thread.join()


def ask(url: str) -> Answer:
    async def run() -> Answer:
        async with Client(url, None) as client:
            return await client.stream("/completions", {"prompt": "a"}, 20)

    return asyncio.run(run())


def test_pieces_come_when_they_come(raw_server: tuple[str, list[bytes]]) -> None:
    url, pieces = raw_server
    text = '{"choices": [{"text": "a\u2028b\u0085c\u2029"}]}'.encode()
    pieces += [
        b": a comment\n\n",
        b"data: " + text[:20],
        text[20:] + b"\r\n\r\ndata:" + text + b"\n\n",
        b'data: {"choices": null, "usage": {"completion_tokens": 7, "prompt_tokens": 3}}\n\n',
        b"data: [DONE]\n\n",
    ]
    answer = ask(url)
    assert (answer.error, len(answer.pieces), answer.tokens, answer.prompt_tokens) == (None, 2, 7, 3)
    assert answer.pieces[0] - answer.start > 0.05
    assert answer.end - answer.pieces[-1] > 0.05


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (b'{"error": "plain words"}', "plain words"),
        (b'{"error": {"message": "in an object"}}', "in an object"),
        (b"[1]", "not a JSON object"),
        (b'{"choices": [1]}', "AttributeError"),
        (b'{"choices": 1}', "TypeError"),
        (b"{", "JSONDecodeError"),
        (b"\xff", "UnicodeDecodeError"),
        (b"{}", "held no text"),
    ],
)
def test_odd_servers_fail_in_words(raw_server: tuple[str, list[bytes]], piece: bytes, words: str) -> None:
    url, pieces = raw_server
    pieces.append(b"data: " + piece + b"\n\n")
    assert words in (ask(url).error or "")


def test_a_run_against_known_delays(raw_server: tuple[str, list[bytes]]) -> None:
    url, pieces = raw_server
    pieces += [b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 150}}\n\n'] * 4
    options = OnlineOptions(url=url, rates=(50.0,), num_requests=4, ttft_ms=1e5, tpot_ms=1e5)
    (run,) = bench_online(options, lambda *_: None).runs
    assert (run.failed, run.good_share, run.output_tokens_mean) == (0, 1.0, 4.0)
    assert run.tpot is not None
    assert run.itl is not None
    assert run.tpot.p50 > 25, "the server sleeps 30 ms between pieces"
    assert run.itl.p50 > 25
