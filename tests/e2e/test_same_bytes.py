"""The same checkpoint, options and targets give the same bytes, whatever machine builds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingot.builder import pack
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import open_engine
from ingot.quickstart import SHIPPED
from ingot.runtime import ModelRunner
from tests.handmade import TINY_LLAMA, random_tensors, write_model
from tests.house.project import ROOT

SLICE = 1 << 12  # so many bytes fill a slice: tiny models have eight


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    model = write_model(folder / "m", config, tensors=random_tensors(config))
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    return folder / "c"


@pytest.mark.daily(1)
@pytest.mark.native
@pytest.mark.parametrize("precision", ["bf16", "w8"])
def test_cores_of_the_machine_that_builds(
    precision: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "SLICE_BYTES", SLICE)
    config = BuildConfig(target="cpu/avx2,cpu/amx,ref", precision=precision, autotune=False)
    built = []
    for cores in (1, 2, 12):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        plan = build(config, checkpoint, tmp_path / str(cores)).plan
        assert max(len(weight.pieces) for weight in plan.weights) == pack.MOST_SLICES
        built.append(files_of(tmp_path / str(cores)))
    assert built[0] == built[1] == built[2]


_BUILD = """
import sys
from pathlib import Path
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
build(BuildConfig(target="ref", precision="w8", autotune=False), Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_instructions_threads_and_hashes_of_the_machine_that_builds(tmp_path: Path) -> None:
    """There numpy and its BLAS add up in other orders. What int8 inputs cost is stored in three digits."""
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=tmp_path / "c"))
    build(BuildConfig(target="ref", precision="w8", autotune=False), tmp_path / "c", tmp_path / "own")
    simd = np.show_config(mode="dicts")
    assert simd is not None, "it is asked for as a dictionary"
    other = {
        "NPY_DISABLE_CPU_FEATURES": " ".join(simd["SIMD Extensions"].get("found", [])),
        "OPENBLAS_CORETYPE": "Sandybridge",
        "OPENBLAS_NUM_THREADS": "2",  # one here, says tests/conftest.py
        "PYTHONHASHSEED": "5",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, str(tmp_path / "c"), str(tmp_path / "other")]
    subprocess.run(command, env={**os.environ, **other}, cwd=tmp_path, check=True, timeout=120)
    assert files_of(tmp_path / "own") == files_of(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.native
def test_any_number_of_threads_reads_any_number_of_slices(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BuildConfig(target="cpu/avx2", precision="w8", autotune=False)
    prompts = [list(range(1, 40)), [7]]
    logits = []
    for most in (1, 8):
        monkeypatch.setattr(pack, "SLICE_BYTES", SLICE)
        monkeypatch.setattr(pack, "MOST_SLICES", most)
        build(config, checkpoint, tmp_path / str(most))
        with open_engine(tmp_path / str(most)) as engine:
            assert max(len(weight.pieces) for weight in engine.plan.weights) == most
        for threads in (1, 2, 3):
            with ModelRunner.from_dir(tmp_path / str(most), threads=threads) as runner:
                out = runner.generate(prompts, max_new_tokens=6, return_dict=True, output_generation_logits=True)
                logits.append(out["generation_logits"])
    for each in logits[1:]:
        np.testing.assert_array_equal(each, logits[0])
