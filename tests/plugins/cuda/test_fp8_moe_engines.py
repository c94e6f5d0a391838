"""Engines of mixtures of experts with FP8 weights and inputs, on the emulated GPU: every layer, and steps of several
sequences, against `ref` on the same plan."""

import contextlib
import ctypes
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ingot.bench.bytes_read import weight_bytes_per_step
from ingot.bench.kernels import op_name
from ingot.builder.build import BuildReport
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.convert import ConvertOptions
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import NoKernelError, UsageError
from ingot.plugins.cuda.devices import LAUNCH, devices_of
from ingot.plugins.cuda.estimate import step_ops
from ingot.plugins.cuda.plan_facts import scratch_bytes, specialisation
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import SessionOptions
from ingot.step_table import step_info
from ingot.step_work import Load
from tests import quantised as write
from tests.plugins.cuda.decode_steps import BLOCKS, compare_decode
from tests.plugins.cuda.test_fp8_engines import BLOCKS_OF_32, BLOCKS_OF_128, ROWS, UNITS, Kind, built
from tests.quantised_experts import Sizes, write_experts

HIDDEN, INNER, SLOTS = 192, 144, 2  # inputs of two groups of columns


def checkpoint(folder: Path, kind: Kind = BLOCKS_OF_128, layers: int = 2) -> Path:
    """Of experts beside one that all rows share."""
    settings, block, name = kind
    sizes = Sizes(hidden=HIDDEN, inner=INNER, shared=160, experts=5, slots=SLOTS, layers=layers)
    write_experts(folder / "model", settings, write.bytes_with_scale(DType.F8, name, block), sizes)
    convert(ConvertOptions(model_dir=folder / "model", dtype=DType.BF16, output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


def kernels(report: BuildReport) -> dict[str, int]:
    """How many kernel calls there are of each that experts or FP8 have."""
    counted = Counter(step.kernel for step in report.plan.steps)
    return {name: count for name, count in counted.items() if "moe_" in name or "fp8" in name}


def expected(units: str) -> dict[str, int]:
    """`kernels` of two layers."""
    return {
        f"round_to_fp8.f32.{units}": 2 * 4,  # of qkv, attention_out, the first halves together, down
        f"fp8_matmul.f8f8.{units}": 2 * 4,
        "moe_route.f32.sm80": 2,
        f"fp8_moe_gate_up.f8f8.{units}": 2,
        f"round_slots_to_fp8.f32.{units}": 2,
        f"fp8_moe_down.f8f8.{units}": 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        pytest.param(ROWS, "cuda/sm90", id="rows-sm90"),
        pytest.param(BLOCKS_OF_128, "cuda/sm90", id="blocks-sm90"),
        pytest.param(ROWS, "cuda/sm89", id="rows-sm89"),
        pytest.param(BLOCKS_OF_128, "cuda/sm89", id="blocks-sm89", marks=pytest.mark.long),
    ],
)
def test_an_engine(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, target: str) -> None:
    """Of a layer, the rounding of its MLP's input is one kernel call for the experts of each row and that of all. Both
    a few and more rows; whole steps without groups alone, where no last bit happens to choose another number of FP8."""
    gpu.emulated_set_devices(1)  # which is of any architecture
    monkeypatch.setenv("INGOT_EMULATED_SM", target.removeprefix("cuda/sm"))
    report = built(tmp_path, checkpoint(tmp_path, kind), target=target, kv_cache_dtype="f32")
    assert kernels(report) == expected(UNITS[target][0])
    for tokens in (5, 40):
        compare(tmp_path / "engine", tmp_path / "checkpoint", CompareOptions(tokens=tokens)).raise_if_wrong()
    if kind is not ROWS:
        return
    engine = open_engine(tmp_path / "engine")
    options = SessionOptions(num_blocks=engine.plan.in_each(BLOCKS))
    with contextlib.closing(find_target(target).open_session(engine.plan, engine.weights, options)) as session:
        compare_decode(session, engine, (5, 1), 1e-4)


@pytest.mark.parametrize("target", ["cuda/sm89", "cuda/sm100", "cuda/sm120"])
def test_every_gpu_whose_matrix_units_multiply_fp8_has_kernels(tmp_path: Path, target: str) -> None:
    """By warps, but for cuda/sm90; the machine code has them beside none of warpgroups."""
    plan = (report := built(tmp_path, checkpoint(tmp_path), target=target, dry_run=True)).plan
    assert kernels(report) == expected("sm89")
    types = specialisation(plan)
    assert (types.fp8, types.experts, types.wide) == (True, True, False)
    tiles = {each for step in plan.steps if find_op(step.op).experts for each in plan.tiles_of(step.name)}
    assert {(each.kernel, each.rows) for each in tiles} == {("experts_f8f8_16", 8), ("experts_f8f8_64", 64)}


def test_ref_computes_what_the_option_says(tmp_path: Path) -> None:
    """Rounding costs an engine little, and verify knows how much."""
    report = built(tmp_path, checkpoint(tmp_path), target="ref")
    assert {step.kernel for step in report.plan.steps if find_op(step.op).experts} == {
        "moe_gate_up.f8f8.ref",
        "moe_down.f8f8.ref",
    }
    compare(tmp_path / "engine", tmp_path / "checkpoint", CompareOptions(tokens=40)).raise_if_wrong()


def test_what_has_no_kernels_is_refused(tmp_path: Path) -> None:
    """By the first product of the model, by all experts; others than FP8 keep their bits."""
    source = checkpoint(tmp_path, layers=1)
    for target in ("cuda/sm80", "cuda/sm86", "cpu/avx2"):
        with pytest.raises(NoKernelError, match=rf"target {target} has no kernel for op matmul with FP8 activations"):
            built(tmp_path, source, target=target, dry_run=True)
        rule = LayerRule(pattern="*moe_*", activations="fp8")
        with pytest.raises(NoKernelError, match=rf"target {target} has no kernel for op moe_gate_up with FP8"):
            built(tmp_path, source, target=target, activations="auto", layers=(rule,), dry_run=True)
    (tmp_path / "small").mkdir()
    with pytest.raises(UsageError, match=r"(?s)FP8 activations are supported only with FP8 weights.*got: f8g32"):
        built(tmp_path, checkpoint(tmp_path / "small", BLOCKS_OF_32, 1), dry_run=True)


@pytest.mark.parametrize(("target", "wide"), [("cuda/sm90", "wide_"), ("cuda/sm89", "")])
def test_auto_keeps_floats_and_some_experts_may_take_fp8(tmp_path: Path, target: str, wide: str) -> None:
    """One half reads codes, the other bf16: rows are sorted for both alike."""
    source, (fp8, floats) = checkpoint(tmp_path, layers=1), UNITS[target]
    report = built(tmp_path, source, target=target, activations="auto", dry_run=True)
    assert kernels(report) == {"moe_route.f32.sm80": 1, f"moe_gate_up.f8.{floats}": 1, f"moe_down.f8.{floats}": 1}
    assert not specialisation(report.plan).fp8
    rule = LayerRule(pattern="*moe_gate_up", activations="fp8")
    report = built(tmp_path, source, target=target, activations="auto", layers=(rule,), dry_run=True)
    assert {f"fp8_moe_gate_up.f8f8.{fp8}", f"moe_down.f8.{floats}"} <= kernels(report).keys()
    assert (specialisation(report.plan).fp8, specialisation(report.plan).wide) == (True, wide != "")
    halves = [report.plan.tiles_of(step.name) for step in report.plan.steps if find_op(step.op).experts]
    assert [[(each.kernel, each.rows) for each in tiles] for tiles in halves] == [
        [(f"experts_f8f8_{wide}16", 8), (f"experts_f8f8_{wide}64", 64)],
        [("experts_f8_8", 8), (f"experts_f8_{wide}64", 64)],
    ]


@pytest.mark.parametrize(
    ("target", "code", "kernel", "faster"),
    [
        ("cuda/sm90", "sm_90a", "experts_f8f8_wide_64", True),
        ("cuda/sm120", "sm_120", "experts_f8f8_64", True),
        ("cuda/sm100", "sm_100", "experts_f8f8_64", False),
    ],
)
def test_what_a_step_costs(tmp_path: Path, target: str, code: str, kernel: str, *, faster: bool) -> None:
    """Experts are read as those that take floats, and multiply at the rate of FP8, on sm_100 at that of 16 bits; a
    kernel call more rounds the inputs of each slot."""
    source = checkpoint(tmp_path, layers=1)
    floats, fp8 = (
        built(tmp_path, source, target=target, activations=each, dry_run=True).plan for each in ("bf16", "fp8")
    )
    assert scratch_bytes(fp8).sums == scratch_bytes(floats).sums == 4 * 48 * SLOTS * HIDDEN
    assert weight_bytes_per_step(fp8) == weight_bytes_per_step(floats)
    (rounding,) = (step for step in fp8.steps if step.op == "round_slots_to_fp8")
    told = {each.name: each for each in step_info(fp8)}[rounding.name]
    assert (op_name(rounding), told.nbytes) == ("round_slots_to_fp8", SLOTS * (4 * INNER + 256 + 4 * 2))
    (device, *_) = devices_of(code)
    fast = dataclasses.replace(device, bandwidth=1e30)  # which operations alone keep busy
    load = Load(sequences=[(0, 40)], logit_rows=40)
    wide, narrow = (
        [each for each in step_ops(plan, fast, load) if each.op.removeprefix("fp8_") in ("moe_gate_up", "moe_down")]
        for plan in (floats, fp8)
    )
    for one, other, last in zip(wide, narrow, ((), ("sum_experts",)), strict=True):
        assert other.operations == one.operations
        assert other.kernels == (kernel, *last)
        busy = [each.seconds - LAUNCH * each.launches for each in (one, other)]
        np.testing.assert_allclose(busy[0] / busy[1], device.rate_fp8 / device.rate if faster else 1, rtol=1e-6)
