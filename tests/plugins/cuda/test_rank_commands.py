"""Commands on GPU engines of two ranks, in processes that MPI starts, each with the emulated GPUs of one machine."""

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ingot.builder.build import build
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.inspect import inspect
from ingot.quickstart import SHIPPED
from ingot.runtime.distributed import find_mpirun
from tests.e2e.test_serve_ranks import PATH, asked, ranks_of, tokens_of
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cuda.emulation import Emulation
from tests.runtime.server.served import ServeProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or find_mpirun() is None, reason="needs mpi4py and mpirun"
    ),
]
PROMPT = ("--prompt", "Once upon a time", "--max_output_len", "6", "--temperature", "0.8", "--seed", "3")
BENCH = ("--input_len", "8", "--output_len", "3", "--repetitions", "1", "--warmup", "0", "--json")
WAYS = {"whole": (1, 1), "tensor": (2, 1), "stages": (1, 2)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the shipped model's tokenizer."""
    folder = tmp_path_factory.mktemp("ranks")
    model = write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16, "vocab_size": 2560})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, model)
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    return folder / "c"


@pytest.fixture
def engines(gpu: ctypes.CDLL, checkpoint: Path, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of each way. Processes that a test starts have two emulated GPUs."""
    folder = checkpoint.parent
    for name, (tp, pp) in WAYS.items():
        config = BuildConfig(
            target="cuda/sm90",
            precision="f32",
            tp_size=tp,
            pp_size=pp,
            sum_parts=2,
            max_seq_len=64,
            max_batch_size=4,
            tokens_per_block=16,
        )
        if not (folder / name).exists():
            build(config, checkpoint, folder / name)
    gpu.emulated_set_devices(2)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulation.libraries))
    monkeypatch.setenv("INGOT_EMULATED_GPUS", "2")
    return folder


def _ingot(*args: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ingot", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=os.environ)


@pytest.mark.parametrize(("name", "collectives"), [("tensor", "shm"), ("stages", "mpi")])
def test_run(engines: Path, name: str, collectives: str) -> None:
    expected = _ingot("run", "--engine_dir", engines / "whole", *PROMPT)
    assert expected.returncode == 0, expected.stderr
    found = _ingot("run", "--engine_dir", engines / name, *PROMPT, "--collectives", collectives)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout
    assert "starting 2 ranks: " in found.stderr


def test_bench(engines: Path) -> None:
    found = _ingot("bench", "latency", "--engine_dir", engines / "tensor", *BENCH)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["input_len"] == 8


def test_too_few_gpus(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_EMULATED_GPUS", "1")
    found = _ingot("run", "--engine_dir", engines / "tensor", *PROMPT)
    assert found.returncode == 1
    assert "ranks 0 and 1 have the same GPU" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("name", ["tensor", "stages"])
def test_verify_and_inspect(engines: Path, checkpoint: Path, name: str) -> None:
    """Every weight, kernel call and layer of both ranks."""
    comparison = compare(engines / name, checkpoint, CompareOptions(tokens=24))
    comparison.raise_if_wrong()
    assert comparison.layers == "compared"
    assert "rank1.engine: " in inspect(engines / name).summary


@pytest.mark.parametrize("name", ["tensor", "stages"])
def test_serve(engines: Path, name: str) -> None:
    """Three streams at once, so that both stages work at the same time; then a rank is killed."""
    bodies = [asked(number, temperature=(0.0, 0.8)[number % 2], stream=True, max_tokens=16) for number in range(3)]
    with ServeProcess(engines / "whole") as whole:
        expected = [httpx.post(f"{whole.url}{PATH}", json=each, timeout=60).text for each in bodies]
    with ServeProcess(engines / name) as server:
        with ThreadPoolExecutor(len(bodies)) as threads:
            found = threads.map(lambda body: httpx.post(f"{server.url}{PATH}", json=body, timeout=60).text, bodies)
            assert [tokens_of(each) for each in found] == [tokens_of(each) for each in expected]
        os.kill(ranks_of(server.process)[1], signal.SIGKILL)
        with contextlib.suppress(httpx.TransportError):  # mpirun may have ended the process already
            httpx.post(f"{server.url}{PATH}", json=bodies[0], timeout=20)
        assert server.wait() != 0
        assert "rank 1" in server.err
