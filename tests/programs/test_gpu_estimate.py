"""The estimate of GPU engines: what it counts, and how far it is from published figures."""

import ctypes
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.cli.app import run
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.inspect import inspect
from ingot.plugins.cuda.devices import DEVICES, LAUNCH, devices_of
from ingot.plugins.cuda.estimate import PRODUCT, estimate, step_ops
from ingot.plugins.cuda.session import device_bytes
from ingot.plugins.cuda.target import CODES
from ingot.step_work import Load
from tests.handmade import TINY_LLAMA, write_model
from tests.house.project import ROOT
from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.conftest import gpu as gpu
from tests.programs.gpu_estimate import PUBLISHED, published_estimate


def test_published_figures_are_met() -> None:
    """With the same two fractions for all of them."""
    ratios = [
        published_estimate(DEVICES[device], *lengths) / figure
        for lengths, figures in PUBLISHED.items()
        for device, figure in zip(("h200", "h100"), figures, strict=True)
    ]
    assert 0.9 < min(ratios) <= max(ratios) < 1.2
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.gpu_estimate", "--published"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "| 1,000 | 1,000 | h200 | 17,744 |" in done.stdout


def test_an_op_takes_the_larger_of_two_limits() -> None:
    device = dataclasses.replace(DEVICES["h200"], bandwidth=100, rate=1000)
    assert device.seconds(80, 1) == 1
    assert device.seconds(1, 600) == 1
    assert device.seconds(1, 1200, rate=2000) == 1
    assert device.seconds(80, 1, 2) == 1 + 2 * LAUNCH


def test_every_target_has_devices() -> None:
    """And every device has figures that can be true."""
    assert {each.name for code in CODES.values() for each in devices_of(code)} == set(DEVICES)
    assert all(map(devices_of, CODES.values()))
    for each in DEVICES.values():
        assert each.rate_f32 < each.rate
        assert each.rate_fp8 in (0, pytest.approx(2 * each.rate, rel=0.03))
        assert each.l2 < each.memory
        assert 1e11 < each.bandwidth < 1e13 < each.rate < 1e16


@pytest.fixture
def engine(gpu: ctypes.CDLL, tmp_path: Path) -> Path:
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", TINY_LLAMA), output_dir=tmp_path / "c"))
    build(BuildConfig(target="cuda/sm90", precision="bf16"), tmp_path / "c", tmp_path / "e")
    return tmp_path / "e"


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [[(64, 1)] * 3, [(0, 40)]])
def test_launches_are_those_of_a_step(engine: Path, sequences: list[tuple[int, int]]) -> None:
    """Decode and prefill of a plan with two layers: attention is one kernel, with splits two."""
    layers, load = int(str(TINY_LLAMA["num_hidden_layers"])), Load(sequences=sequences, logit_rows=len(sequences))
    ops = list(step_ops(read_plan(engine), DEVICES["h200"], load))
    launches = Counter[str]()
    for each in ops:
        launches[each.op] += each.launches
    assert launches["rope_kv_write"] == layers
    assert launches["paged_attention"] in (layers, 2 * layers)
    assert launches["draw"] == 1
    kernels = {name for each in ops if each.op == "matmul" for name in each.kernels}
    assert ("product_8" in kernels, PRODUCT in kernels) == (True, len(sequences) == 1)
    assert all(each.seconds >= LAUNCH * each.launches > 0 for each in ops)


@pytest.mark.slow
def test_build_and_inspect_print_it(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times of an engine that is built, read, and read by a program are the same."""
    plan = read_plan(engine)
    expected = [str(estimate(plan, each)) for each in devices_of("sm_90a")]
    found = inspect(engine)
    assert [line for line in found.summary.splitlines() if line.startswith("estimate")] == [
        f"estimate    {each}" for each in expected
    ]
    h200 = next(each for each in found.document["estimate"] if each["device"]["name"] == "h200")
    assert json.loads(json.dumps(h200)) == json.loads(json.dumps(estimate(plan, DEVICES["h200"]).record()))
    assert [each["sequences"] for each in h200["steps"]] == [1, 8, 64, 1]
    assert "H200 SXM, prefill of" in found.text
    assert "| matmul |" in found.text
    arguments = ["build", "--checkpoint_dir", str(tmp_path / "c"), "--output_dir", str(tmp_path / "e2")]
    assert run([*arguments, "--target", "cuda/sm90", "--precision", "bf16", "--dry_run"]) == 0
    told = capsys.readouterr()
    assert all(f"estimate  {each}" in told.out + told.err for each in expected)


@pytest.mark.slow
def test_a_model_that_does_not_fit_gets_no_time(engine: Path) -> None:
    """Nor does a batch whose KV cache has no room."""
    plan, h200 = read_plan(engine), DEVICES["h200"]
    small = estimate(plan, dataclasses.replace(h200, memory=1000.0))
    assert not small.fits
    assert "does not fit" in str(small)
    each = sum(group.blocks_of(9) * group.block_bytes for group in plan.caches)
    tight = dataclasses.replace(h200, memory=device_bytes(plan) + 7.5 * each)
    assert [step.sequences for step in estimate(plan, h200, (1, 8), 8).steps] == [1, 8, 1]
    assert [step.sequences for step in estimate(plan, tight, (1, 8), 8).steps] == [1, 1]
