"""A trace becomes lengths and arrivals; the search finds the highest good rate of each mode."""

import itertools
import json
import time
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ingot.bench.serve import ServeOptions, _Load, bench_serve
from ingot.bench.trace import TraceRow, arrivals_at, read_trace, scale_lengths
from ingot.cli import app
from ingot.errors import UsageError
from ingot.runtime.model_runner import ModelRunner
from tests.runtime.fake_session import VOCAB
from tests.runtime.repeating import LIMITS
from tests.runtime.test_steps_in_flight import FakePipeline
from tests.runtime.tiny_engine import make_executor, write_tiny
from tests.runtime.tiny_plan import make_model

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write_trace(path: Path, count: int = 12) -> Path:
    rows = [f"2023-11-16 18:15:{n:02}.{n % 10}805900,{40 + 13 * n},{4 + 5 * n}" for n in range(count)]
    path.write_text(HEAD + "\n".join(rows))
    return path


def test_a_trace_is_read_scaled_and_clipped(tmp_path: Path) -> None:
    rows = read_trace(write_trace(tmp_path / "t.csv"), 3)
    assert [row.arrival for row in rows] == pytest.approx([0, 1.1, 2.2])
    assert [(row.input_len, row.output_len) for row in rows] == [(40, 4), (53, 9), (66, 14)]
    scaled = scale_lengths(rows, 0.25, 15, 3)
    assert [(row.input_len, row.output_len) for row in scaled] == [(10, 1), (13, 2), (15, 3)]
    assert scale_lengths(rows, 0.01, 15, 3)[0].output_len == 1


def test_the_recorded_trace_is_read(shared: Path) -> None:
    rows = read_trace(shared / "data/traces/AzureLLMInferenceTrace_conv_2023.csv", 1000)
    assert (rows[0].input_len, rows[0].output_len) == (374, 44)
    assert rows[1].arrival == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "lacks columns"),
        (HEAD, "too few requests"),
        (HEAD + "yesterday,1,2\nx,1,2\n", "t.csv:2"),
        (HEAD + "2023-11-16 18:15:46.68,1,0\n" * 2, "0 tokens"),
        (HEAD + "2023-11-16 18:15:46.680590,1,2\n2023-11-16 18:15:45.680590,1,2\n", "order of time"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_trace(path, 2)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", 2)


@pytest.mark.parametrize("poisson", [False, True])
def test_arrivals_are_stretched_by_one_factor(poisson: bool) -> None:
    rows = [TraceRow(arrival=float(n**2), input_len=1, output_len=1) for n in range(11)]
    slow, fast = (arrivals_at(rows, rate, poisson=poisson, seed=1) for rate in (2.0, 8.0))
    assert slow[0] == 0
    assert slow[-1] == pytest.approx(10 / 2)
    np.testing.assert_allclose(np.array(slow), 4 * np.array(fast))
    assert (slow[1] == pytest.approx(0.05)) != poisson
    assert slow == sorted(slow)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("bench") / "tiny", make_model())


@pytest.mark.slow
def test_the_search_brackets_the_goodput(engine: Path, tmp_path: Path) -> None:
    options = ServeOptions(
        engine_dir=engine,
        trace=write_trace(tmp_path / "t.csv"),
        num_requests=12,
        ttft_ms=300,
        tpot_ms=200,
        max_output=6,
        rate_precision=1.0,
    )
    report = bench_serve(options, lambda stage, done, total: None)
    assert [mode.mode for mode in report.modes] == ["chunked_mixed", "neither"]
    assert (report.max_input, report.max_output) == (48, 6)
    for mode in report.modes:
        good = [run.rate for run in mode.rates if run.good_share >= 0.9]
        bad = [run.rate for run in mode.rates if run.good_share < 0.9]
        assert mode.goodput == max(good)
        assert all(rate > mode.goodput for rate in bad)
        assert all(run.ttft_ms_p50 is not None for run in mode.rates if run.complete)
    assert all(run.mixed_steps == 0 for run in report.modes[1].rates)
    assert any(run.mixed_steps > 0 for run in report.modes[0].rates)
    assert all(min(mode.saturated) > 0 for mode in report.modes)
    assert report.drift == max(max(mode.saturated) / min(mode.saturated) for mode in report.modes)
    assert report.ratio == pytest.approx(report.modes[0].goodput / report.modes[1].goodput)


def test_limits_that_nothing_meets_give_no_goodput(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--trace", str(write_trace(tmp_path / "t.csv")), "--num_requests", "2", "--tpot_ms", "0.0001", "--json"]
    assert app.run(["bench", "serve", "--offline", "--engine_dir", str(engine), *args, "--start_rate", "500"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [mode["goodput"] for mode in report["modes"]] == [0, 0]
    assert report["ratio"] is None
    assert not any(run["complete"] for mode in report["modes"] for run in mode["rates"])


def test_a_machine_that_changes_its_speed_is_told(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = itertools.chain([9.0, 9.0, 9.0, 9.0], itertools.repeat(3.0))
    monkeypatch.setattr("ingot.bench.serve._Load.saturated_rate", lambda load: next(rates))
    args = ["--trace", str(write_trace(tmp_path / "t.csv")), "--num_requests", "2", "--tpot_ms", "0.0001"]
    assert app.run(["bench", "serve", "--offline", "--engine_dir", str(engine), *args, "--start_rate", "500"]) == 0
    assert "speed changed 3.00 times" in capsys.readouterr().out


def test_the_modes_take_turns(engine: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options = ServeOptions(
        engine_dir=engine, trace=write_trace(tmp_path / "t.csv"), num_requests=2, tpot_ms=1e-4, start_rate=500.0
    )
    bench_serve(options, lambda stage, done, total: said.append(stage.split(",")[0]))
    assert said[:4] == ["chunked_mixed", "neither", "chunked_mixed", "neither"]


def test_lengths_beyond_the_engine_are_refused(engine: Path, tmp_path: Path) -> None:
    options = ServeOptions(engine_dir=engine, trace=write_trace(tmp_path / "t.csv"), num_requests=2, max_input=768)
    with pytest.raises(UsageError, match="more than the engine allows"):
        bench_serve(options, lambda stage, done, total: None)


class OneRate:
    """In place of a runner, whose executor is not used."""


def load_of(count: int, **options: Any) -> _Load:
    rows = [TraceRow(arrival=0.0, input_len=4, output_len=3) for _ in range(count)]
    asked = ServeOptions(engine_dir=Path("e"), trace=Path("t"), num_requests=count, **options)
    return _Load(OneRate(), rows, asked)  # type: ignore[arg-type]


def test_offline_times_count_from_the_arrival() -> None:
    """Request 0 arrives at 1 s, gets its first token 0.2 s later and one every 0.1 s; the last one did not end."""
    load = load_of(4, ttft_ms=300, tpot_ms=150)
    times = [[1.2, 1.3, 1.4], [2.5, 2.6, 2.7], [3.1, 3.3, 3.5], [4.1]]
    arrivals = [1.0, 2.0, 3.0, 4.0]
    assert [load._good(tokens, at) for tokens, at in zip(times, arrivals, strict=True)] == [True, False, False, True]
    steps = [(4, 0), (0, 2), (4, 1), (0, 0)]
    report = load._report(0.5, times, arrivals, steps, complete=True)
    assert report.good_share == 0.25
    assert (report.ttft_ms_p50, report.ttft_ms_p90) == pytest.approx((200, 440))
    assert (report.tpot_ms_p50, report.tpot_ms_p90) == pytest.approx((100, 180))
    assert (report.mixed_steps, report.steps, report.rate) == (1, 4, 0.5)


@pytest.mark.parametrize(("missed", "complete"), [(1, True), (2, False)])
def test_a_run_is_given_up_when_goodput_is_lost(missed: int, complete: bool, engine: Path, tmp_path: Path) -> None:
    """One of ten may miss a limit."""
    options = ServeOptions(engine_dir=engine, trace=tmp_path, num_requests=10, ttft_ms=1e6, tpot_ms=1e6)
    rows = [TraceRow(arrival=0.0, input_len=3, output_len=2) for _ in range(10)]
    with ModelRunner.from_dir(engine) as runner:
        load = _Load(runner, rows, options)
        bad = iter([False] * missed + [True] * 100)
        load._good = lambda tokens, arrival: next(bad)  # type: ignore[method-assign]
        assert load.run(1e6).complete == complete


def test_a_run_that_is_given_up_leaves_no_step_under_way(tmp_path: Path) -> None:
    """The runner of the other mode uses the same session where there are several ranks."""
    session = FakePipeline(400, 2)
    session.before_step = lambda batch: time.sleep(0.01)
    executor = make_executor(session, LIMITS, 4)
    runner = types.SimpleNamespace(executor=executor, model_info=types.SimpleNamespace(vocab_size=VOCAB))
    rows = [TraceRow(arrival=0.0, input_len=8, output_len=4 + 20 * n) for n in range(4)]
    options = ServeOptions(engine_dir=tmp_path, trace=tmp_path, ttft_ms=1e-3)
    try:
        report = _Load(cast("ModelRunner", runner), rows, options).run(100.0)
        assert not report.complete
        assert session.most == 2
        assert not session.under_way
    finally:
        executor.close()
