"""Weights in a copy or where the file is mapped: the same tokens, and who decides."""

import logging
from pathlib import Path

import pytest

from ingot.configs.runtime import RuntimeConfig
from ingot.errors import CapacityError, UsageError
from ingot.manifest import rank_file
from ingot.plugins.registry import find_target
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import load_engine
from ingot.weights_memory import offers_huge_pages
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model

pytestmark = pytest.mark.skipif(not offers_huge_pages(), reason="this machine lacks 2 MiB pages")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mmap")
    ingot("convert", "--model_dir", write_model(folder / "m", TINY_LLAMA), "--output_dir", folder / "c").succeeds()
    target = find_target("cpu").name
    ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / "e", "--target", target).succeeds()
    return folder / "e"


def is_mapped(engine: Path, config: RuntimeConfig) -> bool:
    """Whether the weights of an engine that has just been loaded lie in its file's mapping."""
    loaded = load_engine(engine, config)
    begin = loaded.engine.weights.ctypes.data
    loaded.session.close()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        low, high = (int(each, 16) for each in span.split("-"))
        if low <= begin < high:
            return name.endswith(rank_file(0))
    raise AssertionError("the weights are not in memory")


def test_who_decides(engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_mapped(engine, RuntimeConfig())
    assert is_mapped(engine, RuntimeConfig(use_mmap=True))
    assert not caplog.records
    plan_bytes = (engine / rank_file(0)).stat().st_size
    monkeypatch.setattr("ingot.runtime.session.available_memory", lambda: plan_bytes)  # the KV cache wants some of it
    with caplog.at_level(logging.WARNING):
        assert is_mapped(engine, RuntimeConfig(kv_cache_memory=plan_bytes))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["weights are read from the mapped file"]


@pytest.mark.parametrize(
    ("wanted", "words"), [(1 << 10, "too small for one sequence"), (900 << 40, "more than this machine has left")]
)
def test_a_cache_that_never_fits_is_the_only_thing_said(
    wanted: int, words: str, engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No copy is missed where even an engine without one has no cache."""
    with caplog.at_level(logging.DEBUG), pytest.raises(CapacityError, match=words):
        load_engine(engine, RuntimeConfig(kv_cache_memory=wanted))
    assert not caplog.records


def test_the_same_tokens(engine: Path) -> None:
    found = []
    for use_mmap in (False, True):
        with ModelRunner.from_dir(engine, use_mmap=use_mmap) as runner:
            found.append(runner.generate([[1, 2, 3], [4]], max_new_tokens=8, end_id=-1).tolist())
    assert found[0] == found[1]
    with pytest.raises(UsageError, match="use_mmap must be True or False"):
        RuntimeConfig(use_mmap="yes")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_commands_take_it(engine: Path) -> None:
    args = ("--engine_dir", engine, "--input_len", 5, "--output_len", 3, "--repetitions", 1, "--warmup", 0)
    ingot("bench", "latency", *args, "--use_mmap", "--log_level", "error").succeeds()
    ingot("bench", "start", *args[:4], *args[6:], "--use_mmap", "--log_level", "error").succeeds()


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o644, True), (0o444, True), (0o664, True), (0o646, False), (0o666, False)]
)
def test_a_file_that_anybody_may_shorten_is_not_mapped(engine: Path, mode: int, taken: bool) -> None:
    file = engine / rank_file(0)
    before = file.stat().st_mode
    file.chmod(mode)
    try:
        with ModelRunner.from_dir(engine):
            pass
        if taken:
            with ModelRunner.from_dir(engine, use_mmap=True):
                pass
        else:
            with pytest.raises(UsageError, match=f"mode {mode:04o}"):
                ModelRunner.from_dir(engine, use_mmap=True)
    finally:
        file.chmod(before)
