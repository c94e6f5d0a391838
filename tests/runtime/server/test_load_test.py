"""`ingot bench serve --url` on a server of our own: counts, limits, errors, the picture."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.bench.load_test import OnlineOptions, bench_online
from ingot.cli import app
from ingot.errors import IngotError, UsageError
from tests.runtime.server.served import CONFIG, Served, serving_engine

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def behind_a_key(engine: Path) -> Iterator[Served]:
    with serving_engine(engine, dataclasses.replace(CONFIG, api_keys=("key",))) as served:
        yield served


def run(*args: object) -> int:
    return app.run(["bench", "serve", *map(str, args)])


@pytest.mark.slow
def test_closed_and_open_loops(behind_a_key: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "latency.png"
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0.1 * place, "input_len": 40 + place, "output_len": 24} for place in range(8)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with behind_a_key.slowly(0.0001):  # a stream of one piece has no TPOT
        code = run(
            "--url",
            behind_a_key.url,
            "--api_key",
            "key",
            "--concurrency",
            3,
            "--rate",
            40,
            "--trace",
            trace,
            "--ignore_eos",
            "--num_requests",
            8,
            "--length_scale",
            1,
            "--ttft_ms",
            1e5,
            "--tpot_ms",
            1e5,
            "--plot",
            picture,
            "--json",
        )
    assert code == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["model"] == "tiny"
    assert [run["load"] for run in report["runs"]] == ["3 at once", "40 requests/s"]
    for each in report["runs"]:
        assert (each["requests"], each["failed"], each["good_share"]) == (8, 0, 1.0)
        assert each["output_tokens_mean"] == 24
        assert 35 < each["prompt_tokens_mean"] < 53
        assert 0 < each["ttft"]["p50"] <= each["ttft"]["p90"] <= each["e2e"]["p99"]
        assert len(each["samples"]["ttft"]) == len(each["samples"]["tpot"]) == 8
        assert each["good_requests_per_second"] == pytest.approx(8 / each["seconds"])
    assert report["runs"][1]["seconds"] >= 7 / 40
    assert [run["rate"] for run in report["runs"]] == [None, 40]
    assert report["goodput"] == 40, "the highest rate of an open loop whose requests were good"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_limits_and_the_table(behind_a_key: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url, key = behind_a_key.url, "key"
    assert (
        run("--url", url, "--api_key", key, "--concurrency", 2, "--num_requests", 4, "--chat", "--ttft_ms", 0.001) == 0
    )
    out = capsys.readouterr().out
    assert "good 0%, 0.000 good requests/s" in out
    assert "goodput" not in out, "a closed loop has no rate"
    assert max(map(len, out.splitlines())) <= 80
    assert run("--url", url, "--api_key", key, "--rate", 50, "--num_requests", 2, "--output_len", 100_000) == 1
    out = capsys.readouterr().out
    assert "status 400: prompt and new tokens together" in out
    assert "goodput: 0 requests/s, the highest --rate with at least 90% good" in out


def test_a_server_of_short_prompts_can_be_used(
    behind_a_key: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.bench.load_test._CALIBRATION", 4000)
    assert run("--url", behind_a_key.url, "--api_key", "key", "--concurrency", 1, "--num_requests", 2, "--json") == 0
    assert 100 < json.loads(capsys.readouterr().out)["runs"][0]["prompt_tokens_mean"] < 160


def test_servers_that_cannot_be_used(behind_a_key: Served) -> None:
    def nothing(stage: str, done: int, total: int) -> None: ...

    with pytest.raises(IngotError, match="status 401"):
        bench_online(OnlineOptions(url=behind_a_key.url, rates=(1.0,)), nothing)
    with pytest.raises(IngotError, match="lists no model"):
        bench_online(OnlineOptions(url="http://127.0.0.1:9", rates=(1.0,)), nothing)
    with pytest.raises(UsageError, match="not the address of a server"):
        bench_online(OnlineOptions(url="ftp://x", rates=(1.0,)), nothing)
    with pytest.raises(UsageError, match="neither --rate nor --concurrency"):
        OnlineOptions(url=behind_a_key.url)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "neither --url nor --offline is given"),
        (("--url", "u", "--offline"), "--url and --offline cannot be combined"),
        (("--url", "http://u", "--threads", 2), "--threads works only with --offline"),
        (("--offline", "--rate", 2), "--rates works only with --url"),
        (("--offline", "--trace", "t"), "needs --engine_dir"),
    ],
)
def test_options_that_do_not_go_together(
    args: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    assert words in capsys.readouterr().err


def test_traces_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    for text, words in (
        ("{}\n{}\n", "cannot be read"),
        ('{"arrival": 0, "input_len": 0, "output_len": 1}\n' * 2, "a length of 0 tokens"),
        ('{"arrival": 0, "input_len": 1, "output_len": 1}\n', "too few"),
    ):
        trace.write_text(text)
        assert run("--url", "http://x", "--rate", 1, "--trace", trace, "--num_requests", 2) == 2
        assert words in capsys.readouterr().err
