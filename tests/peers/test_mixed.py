"""The comparison of peers under a mixed load, without a peer: search, runs, ingot's server, table and picture."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.bench.http_client import Answer
from tests.peers.__main__ import parse
from tests.peers.adapters import ingot as ingot_adapter
from tests.peers.adapters.protocol import Job
from tests.peers.adapters.stepping import run_load as run_stepping
from tests.peers.clients import FailedError, drive, run_load
from tests.peers.goodput import RESOLUTION, Search, allowed_misses
from tests.peers.load import Fate, Load, Run, hopeless
from tests.peers.mixed import Bench, MixedOptions
from tests.peers.models import SHAPES, write_model
from tests.peers.peers import INGOT, PEERS
from tests.peers.picture import draw
from tests.peers.report import Heading, markdown
from tests.peers.rounds import Mixed, Outcome, Trial

TINY = {
    **SHAPES["tinyllama"],
    "vocab_size": 32000,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_trace(path: Path, rows: Sequence[tuple[float, int, int]]) -> Path:
    """rows: arrival, tokens in, tokens out."""
    lines = [f"2023-11-16 18:15:{when:010.7f},{context},{generated}" for when, context, generated in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


def load(count: int, **changes: Any) -> Load:
    plain = Load(
        prompts=[[400 + number] * 4 for number in range(count)],
        outputs=[3] * count,
        arrivals=[0.0] * count,
        ttft=1.0,
        tpot=1.0,
        allowed=None,
    )
    return dataclasses.replace(plain, **changes)


def searched(shares: Callable[[float], Sequence[float]], possible: Sequence[bool]) -> tuple[Search, list[float]]:
    """A search whose runs are complete while the limit it looks at is kept; the rates in their order."""
    search, rates = Search(start=1.0, highest=20.0, limits=len(possible), possible=possible), []
    while (attempt := search.attempt()) is not None:
        rates.append(attempt.rate)
        found = shares(attempt.rate)
        search.note(attempt, found, complete=found[attempt.limit] >= 0.9)
        assert len(rates) < 30
    return search, rates


@pytest.mark.parametrize("limits", [(3.3, 0.4), (0.3, 0.29), (7.0, 7.0), (1.05, 0.07)])
def test_search_ends_just_below_the_highest_good_rate_of_each_limit(limits: tuple[float, float]) -> None:
    search, rates = searched(lambda rate: [1.0 if rate <= limit else 0.5 for limit in limits], [True, True])
    for goodput, limit in zip(search.goodputs, limits, strict=True):
        assert goodput <= limit < goodput * RESOLUTION
    assert len(rates) == len(set(rates)) <= 14


def test_search_stops_where_no_rate_is_good_or_every_one_is() -> None:
    search, rates = searched(lambda rate: [0.0, 0.0], [True, False])
    assert search.goodputs == [0.0, 0.0]
    assert min(rates) >= 1 / 16
    assert searched(lambda rate: [0.0], [False])[1] == []
    assert 20 <= searched(lambda rate: [1.0], [True])[0].goodputs[0] <= 40


def test_a_run_that_was_given_up_for_the_tight_limit_says_nothing_of_the_loose_one() -> None:
    search = Search(start=1.0, highest=9.0, limits=2, possible=[True, True])
    loose = search.attempt()
    assert loose is not None
    assert loose.limit == 0
    search.note(loose, [0.95, 0.1], complete=True)
    above = search.attempt()
    assert above is not None
    assert above.rate == 2
    search.note(above, [0.5, 0.1], complete=False)
    while (attempt := search.attempt()) is not None and attempt.limit == 0:
        search.note(attempt, [0.2, 0.1], complete=False)
    assert attempt is not None
    assert (attempt.limit, attempt.rate) == (1, 0.5)
    search.note(attempt, [0.3, 0.3], complete=False)
    assert search.goodputs[0] == 1


def test_nine_of_ten_must_be_good() -> None:
    assert [allowed_misses(count) for count in (200, 10, 9)] == [20, 1, 0]


def test_a_run_is_hopeless_as_soon_as_too_many_are_late() -> None:
    late, ended, slow = Fate(due=0.0), Fate(due=0.0, ended=True), Fate(due=0.0, ended=True)
    ended.token(0.5, 1)
    slow.token(0.5, 1)
    slow.token(9.5, 2)
    assert (ended.ttft, ended.tpot, slow.tpot) == (0.5, None, 4.5)
    asked = load(3, allowed=1)
    assert hopeless(asked, [late, ended, slow], now=1.5)
    assert not hopeless(asked, [late, ended, slow], now=0.9)
    assert not hopeless(dataclasses.replace(asked, allowed=None), [late, late, slow], now=9.0)
    failed = Fate(due=0.0, ended=True, error="status 500")
    failed.token(0.1, 3)
    assert not failed.good(1.0, 1.0)


def test_loads_and_runs_survive_json() -> None:
    asked = load(2, arrivals=None, allowed=3)
    assert Load.from_json(asked.as_json()) == asked
    run = Run(
        fates=[Fate(due=1.0, first=2.0, last=3.0, tokens=4, ended=True), Fate(due=2.0)], complete=False, seconds=5
    )
    assert Run.from_json(run.as_json()) == run


class Steps:
    """An engine that gives each running request a token in a step of 5 ms, of at most two requests."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self.most = 0

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        self.waiting[number] = tokens

    def step(self) -> Mapping[int, int]:
        assert self.waiting, "there is nothing to do"
        time.sleep(0.005)
        chosen = list(self.waiting)[:2]
        self.most = max(self.most, len(self.waiting))
        for number in chosen:
            self.waiting[number] -= 1
            if not self.waiting[number]:
                del self.waiting[number]
        return dict.fromkeys(chosen, 1)


def test_an_engine_without_a_server_takes_requests_when_they_are_due() -> None:
    engine = Steps()
    run = run_stepping(engine, load(3, arrivals=[0.0, 0.0, 0.2]))
    assert run.complete
    assert [(fate.tokens, fate.ended, fate.due) for fate in run.fates] == [
        (3, True, 0.0),
        (3, True, 0.0),
        (3, True, 0.2),
    ]
    assert run.seconds >= 0.2 + 3 * 0.005
    assert all(fate.tpot is not None and 0.005 <= fate.tpot < 0.1 for fate in run.fates)
    alone = Steps()
    assert run_stepping(alone, load(4, arrivals=None)).complete
    assert alone.most == 1
    given_up = run_stepping(Steps(), load(50, ttft=0.02, allowed=5))
    assert not given_up.complete
    assert given_up.seconds < 0.3


class OneAtATime:
    """In place of a Client: each request is alone for three tokens of 5 ms."""

    def __init__(self, *, tokens: int = 3) -> None:
        self._tokens, self._lock, self.bodies = tokens, asyncio.Lock(), list[Mapping[str, Any]]()

    async def stream(self, path: str, body: Mapping[str, Any], timeout: float, answer: Answer) -> Answer:
        self.bodies.append(body)
        async with self._lock:
            for _ in range(self._tokens):
                await asyncio.sleep(0.005)
                answer.pieces.append(time.perf_counter())
        answer.tokens, answer.end = self._tokens, time.perf_counter()
        return answer


def driven(asked: Load, client: OneAtATime | None = None) -> Run:
    async def run() -> Run:
        return await drive(client or OneAtATime(), asked)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_the_client_counts_from_the_planned_arrival_and_gives_up() -> None:
    client = OneAtATime()
    run = driven(load(4), client)
    assert run.complete
    ttfts = [fate.ttft or 0.0 for fate in run.fates]
    assert ttfts == sorted(ttfts)
    assert ttfts[3] >= 3 * 0.015
    assert [body["prompt"] for body in client.bodies] == [[400 + number] * 4 for number in range(4)]
    alone = driven(load(4, arrivals=None))
    assert max(fate.ttft or 9.0 for fate in alone.fates) < ttfts[3]
    given_up = driven(load(200, ttft=0.05, allowed=3))
    assert not given_up.complete
    assert given_up.seconds < 1.0


def test_an_answer_of_another_length_is_an_error() -> None:
    assert driven(load(1), OneAtATime(tokens=2)).fates[0].error == "2 tokens came, of 3"


def test_bench_finds_the_rate_that_an_engine_bears(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", [(0.1 * number, 40 + number, 8) for number in range(50)])
    options = MixedOptions(trace=trace, requests=50, ttft=0.5, tpots=(0.2, 0.01))

    def run(asked: Load) -> Run:
        """0.1 s for each request, one after the other; a token takes 20 ms."""
        fates, free = [], 0.0
        for number, tokens in enumerate(asked.outputs):
            due = free if asked.arrivals is None else asked.arrivals[number]
            begin, free = max(due, free), max(due, free) + 0.1
            fate = Fate(due=due, ended=True)
            fate.token(begin + 0.06)
            fate.token(begin + 0.06 + 0.02 * (tokens - 1), tokens - 1)
            fates.append(fate)
        return Run(fates=fates, complete=not hopeless(asked, fates, free), seconds=free)

    mixed = Mixed()
    bench = Bench(options, options.rows(), run, mixed)
    while bench.advance() is not None:
        pass
    assert mixed.at_once == pytest.approx(10)
    assert 9 < mixed.goodputs[0] < 11.5
    assert mixed.goodputs[1] == 0
    assert [trial.name for trial in mixed.trials[:2]] == ["alone", "at once"]
    assert mixed.trials[0].ttft[0] == pytest.approx(0.06)
    assert mixed.trials[0].shares == [1.0, 0.0]


def test_bench_says_why_nothing_ended(tmp_path: Path) -> None:
    options = MixedOptions(trace=write_trace(tmp_path / "t.csv", [(0.1, 40, 8), (0.2, 40, 8)]), requests=2)
    broken = Run(fates=[Fate(due=0.0, ended=True, error="status 400: no")], complete=True, seconds=1.0)
    with pytest.raises(FailedError, match="status 400: no"):
        Bench(options, options.rows(), lambda _: broken, Mixed()).advance()


def test_lengths_are_scaled_and_clipped(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", [(0.5, 400, 100), (1.5, 9000, 5000), (2.0, 1, 1)])
    rows = MixedOptions(trace=trace, requests=3).rows()
    assert [(row.arrival, row.input_len, row.output_len) for row in rows] == [(0, 100, 25), (1, 768, 256), (1.5, 1, 1)]


@pytest.mark.slow
@pytest.mark.native
def test_ingot_serves_a_load(tmp_path: Path) -> None:
    job = Job(work=tmp_path, model="tiny", peer="ingot", weights="w8", isa="avx2", threads=1, regimes="")
    write_model(TINY, job.checkpoint)
    ingot_adapter.prepare(job)
    asked = load(5, arrivals=[0.0, 0.01, 0.02, 0.03, 0.04], outputs=[1, 2, 3, 4, 5], ttft=30.0, tpot=30.0, allowed=0)
    run = run_load(INGOT, job, {}, asked)
    assert [fate.error for fate in run.fates] == [None] * 5
    assert [fate.tokens for fate in run.fates] == [1, 2, 3, 4, 5]
    assert run.complete
    with pytest.raises(FailedError, match=r"the server does not answer: .*it said: .*"):
        run_load(INGOT, dataclasses.replace(job, weights="w4g128"), {}, asked)


def outcome(engine: str, at_once: float, *goodputs: float) -> Outcome:
    alone = Trial(
        name="alone",
        requests=5,
        ended=5,
        complete=True,
        seconds=1.0,
        shares=[1.0, 1.0],
        ttft=(0.5, 0.6),
        tpot=(0.04, 0.05),
        error=None,
    )
    mixed = Mixed(at_once=at_once, goodputs=goodputs, trials=[alone])
    return Outcome(engine=engine, precision="w8", weights="w", version="1.0", mixed=mixed)


HEADING = Heading(
    model="tinyllama",
    date="2026-01-02 03:04",
    machine="a machine",
    isa="avx2",
    threads=2,
    rounds=3,
    regimes=[],
    load="200 requests",
    tpots=[0.2, 0.05],
)


def test_table_compares_with_the_best_peer_and_picture_shows_it(tmp_path: Path) -> None:
    none = Outcome(engine="c", precision="w8", weights="w", mixed=Mixed(reason="no continuous batching"))
    outcomes = [outcome("ingot", 4.0, 3.0, 0.5), outcome("a", 1.0, 0.5, 0.0), outcome("b", 2.0, 1.0, 0.0), none]
    lines = markdown(HEADING, outcomes).splitlines()
    for line in (
        "| engine | weights | alone: TTFT, TPOT | all at once | goodput, TPOT < 200 ms | goodput, TPOT < 50 ms |",
        "| ingot | w | 0.50 s, 40 ms | 4 | 3 | 0.5 |",
        "| a | w | 0.50 s, 40 ms | 1 | 0.5 | 0 |",
        "| c | w | – | – | – | – |",
        "| *ingot over the best peer* | w8 |  | 2.00 (b w) | 3.00 (b w) | no peer has any |",
        "- no mixed load: c w: no continuous batching",
    ):
        assert line in lines, lines
    assert not any(line.startswith("Tokens per second") for line in lines)
    draw(HEADING, outcomes, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_trace_the_report_says_so() -> None:
    plain = dataclasses.replace(HEADING, load=None)
    assert "- no mixed load: no trace was given (--trace FILE)" in markdown(plain, [outcome("ingot", 1.0)]).splitlines()


def test_who_takes_a_mixed_load() -> None:
    assert {peer.name for peer in PEERS if peer.serving is not None} == {"llama.cpp", "openvino", "vllm"}


@pytest.mark.native
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "no/such/file.csv"], "the trace cannot be read"),
        (["--requests", "3"], "the trace has too few requests"),
        (["--requests", "0"], "must be above 0"),
        (["--tpot_ms", "fast"], "--tpot_ms fast: expected numbers"),
    ],
)
def test_bad_input_is_refused_in_words(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.csv", [(0.5, 400, 100), (1.5, 40, 10)])
    with pytest.raises(SystemExit) as ended:
        parse(["--work", str(tmp_path), "--model", "tinyllama", "--trace", str(trace), *arguments], ("avx512", "avx2"))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.native
def test_limits_of_the_mixed_load_are_read(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.csv", [(0.5, 400, 100), (1.5, 40, 10)])
    words = ["--work", str(tmp_path), "--model", "tinyllama", "--trace", str(trace), "--requests", "2"]
    mixed = parse([*words, "--tpot_ms", "50,200", "--ttft_ms", "1500", "--regimes", "none"], ("avx2",)).mixed
    assert mixed == MixedOptions(trace=trace.resolve(), requests=2, ttft=1.5, tpots=[0.2, 0.05])
    assert parse(words[:4], ("avx2",)).mixed is None
