"""The forecast of GPU engines: what it counts, and how far it is from published figures."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from tests.handmade import TINY_LLAMA, write_model
from tests.house.project import ROOT
from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.conftest import gpu as gpu
from tests.programs.gpu_forecast import DEVICES, LAUNCH, PUBLISHED, Device, published_forecast, step_forecast


def test_published_figures_are_met() -> None:
    """With the same two fractions for all of them."""
    ratios = [
        published_forecast(DEVICES[device], *lengths) / figure
        for lengths, figures in PUBLISHED.items()
        for device, figure in zip(("h200", "h100"), figures, strict=True)
    ]
    assert 0.9 < min(ratios) <= max(ratios) < 1.2
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.gpu_forecast", "--published"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "| 1,000 | 1,000 | h200 | 17,744 |" in done.stdout


def test_an_op_takes_the_larger_of_two_limits() -> None:
    device = Device(memory=1, bandwidth=100, rate=1000, rate_fp8=2000, multiprocessors=4, source="")
    assert device.seconds(80, 1) == 1
    assert device.seconds(1, 600) == 1
    assert device.seconds(1, 1200, fp8=True) == 1
    assert device.seconds(80, 1, 2) == 1 + 2 * LAUNCH


@pytest.mark.parametrize("sequences", [[(64, 1)] * 3, [(0, 40)]])
def test_launches_are_those_of_a_step(gpu: ctypes.CDLL, tmp_path: Path, sequences: list[tuple[int, int]]) -> None:
    """Decode and prefill of a plan with two layers: attention is one kernel, with splits two."""
    layers = int(str(TINY_LLAMA["num_hidden_layers"]))
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", TINY_LLAMA), output_dir=tmp_path / "c"))
    build(BuildConfig(target="cuda/sm90", precision="bf16"), tmp_path / "c", tmp_path / "e")
    lines = {each.kind: each for each in step_forecast(read_plan(tmp_path / "e"), DEVICES["h200"], sequences)}
    assert lines["rope_kv_write"].launches == layers
    assert lines["paged_attention"].launches in (layers, 2 * layers)
    assert lines["matmul"].nbytes > lines["rms_norm"].nbytes > 0
    assert all(each.seconds >= LAUNCH * each.launches > 0 for each in lines.values())
