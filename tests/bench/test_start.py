"""Starts of an engine: the phases of a process add up, and what keeps one from starting is told."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    ingot("convert", "--model_dir", write_model(folder / "m", TINY_LLAMA), "--output_dir", folder / "c").succeeds()
    ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / "e", "--target", "ref").succeeds()
    return folder / "e"


@pytest.mark.slow
def test_the_phases_of_a_start_add_up(engine: Path) -> None:
    args = ("--input_len", 5, "--warmup", 0, "--repetitions", 1, "--log_level", "warning")
    report = json.loads(ingot("bench", "start", "--engine_dir", engine, *args, "--json").succeeds().out)
    parts = [report[f"{name}_ms"] for name in ("interpreter", "import", "open", "first_token")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(report["total_ms"])
    assert report["target"] == "ref"
    assert report["peak_bytes"] > report["beside_bytes"] > 1_000_000


@pytest.mark.slow
def test_a_start_for_people(engine: Path) -> None:
    args = ("--input_len", 5, "--warmup", 0, "--repetitions", 2, "--log_level", "warning")
    out = ingot("bench", "start", "--engine_dir", engine, *args).succeeds().out
    for words in ("first token of a prompt of 5 after", "median of 2 starts", "open and check", "MiB"):
        assert words in out


@pytest.mark.slow
def test_what_keeps_an_engine_from_starting_is_told(engine: Path, tmp_path: Path) -> None:
    ingot("bench", "start", "--engine_dir", tmp_path / "none").fails("none", code=2)
    ingot("bench", "start", "--engine_dir", engine, "--input_len", 65).fails("--input_len", "at most", code=2)
    start = ("bench", "start", "--engine_dir", engine, "--input_len", 5)
    ingot(*start, "--target", "cpu").fails("a process could not start", "the engine has no target cpu", "ref")
    weights = engine / "rank0.engine"
    data = weights.read_bytes()
    try:
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        ingot(*start).fails("a process could not start the engine", "rank0.engine")
    finally:
        weights.write_bytes(data)
