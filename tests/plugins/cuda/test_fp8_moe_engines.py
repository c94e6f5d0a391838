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
from tests.plugins.cuda.test_fp8_engines import BLOCKS_OF_32, BLOCKS_OF_128, ROWS, Kind, built
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ROWS, BLOCKS_OF_128], ids=["rows", "blocks"])
def test_an_engine(gpu: ctypes.CDLL, tmp_path: Path, kind: Kind) -> None:
    """Of a layer, the rounding of its MLP's input is one kernel call for the experts of each row and that of all. Both
    a few and more rows; whole steps without groups alone, where no last bit happens to choose another number of FP8."""
    report = built(tmp_path, checkpoint(tmp_path, kind), kv_cache_dtype="f32")
    assert kernels(report) == {
        "round_to_fp8.f32.sm90a": 2 * 4,  # of qkv, attention_out, the first halves together, down
        "fp8_matmul.f8f8.sm90a": 2 * 4,
        "moe_route.f32.sm80": 2,
        "fp8_moe_gate_up.f8f8.sm90a": 2,
        "round_slots_to_fp8.f32.sm90a": 2,
        "fp8_moe_down.f8f8.sm90a": 2,
    }
    for tokens in (5, 40):
        compare(tmp_path / "engine", tmp_path / "checkpoint", CompareOptions(tokens=tokens)).raise_if_wrong()
    if kind is not ROWS:
        return
    engine = open_engine(tmp_path / "engine")
    options = SessionOptions(num_blocks=engine.plan.in_each(BLOCKS))
    with contextlib.closing(find_target("cuda/sm90").open_session(engine.plan, engine.weights, options)) as session:
        compare_decode(session, engine, (5, 1), 1e-4)


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
    for target in ("cuda/sm80", "cpu/avx2"):
        with pytest.raises(NoKernelError, match=rf"target {target} has no kernel for op matmul with FP8 activations"):
            built(tmp_path, source, target=target, dry_run=True)
        rule = LayerRule(pattern="*moe_*", activations="fp8")
        with pytest.raises(NoKernelError, match=rf"target {target} has no kernel for op moe_gate_up with FP8"):
            built(tmp_path, source, target=target, activations="auto", layers=(rule,), dry_run=True)
    (tmp_path / "small").mkdir()
    with pytest.raises(UsageError, match=r"(?s)FP8 activations are supported only with FP8 weights.*got: f8g32"):
        built(tmp_path, checkpoint(tmp_path / "small", BLOCKS_OF_32, 1), dry_run=True)


def test_auto_keeps_floats_and_some_experts_may_take_fp8(tmp_path: Path) -> None:
    """One half reads codes, the other bf16: rows are sorted for both alike."""
    source = checkpoint(tmp_path, layers=1)
    report = built(tmp_path, source, activations="auto", dry_run=True)
    assert kernels(report) == {"moe_route.f32.sm80": 1, "moe_gate_up.f8.sm90a": 1, "moe_down.f8.sm90a": 1}
    assert not specialisation(report.plan).fp8
    rule = LayerRule(pattern="*moe_gate_up", activations="fp8")
    report = built(tmp_path, source, activations="auto", layers=(rule,), dry_run=True)
    assert {"fp8_moe_gate_up.f8f8.sm90a", "moe_down.f8.sm90a"} <= kernels(report).keys()
    assert specialisation(report.plan).fp8
    halves = [report.plan.tiles_of(step.name) for step in report.plan.steps if find_op(step.op).experts]
    assert [[(each.kernel, each.rows) for each in tiles] for tiles in halves] == [
        [("experts_f8f8_wide_16", 8), ("experts_f8f8_wide_64", 64)],
        [("experts_f8_8", 8), ("experts_f8_wide_64", 64)],
    ]


def test_what_a_step_costs(tmp_path: Path) -> None:
    """Experts are read as those that take floats, and multiply at the rate of FP8; a kernel call more rounds the inputs
    of each slot."""
    source = checkpoint(tmp_path, layers=1)
    floats, fp8 = (built(tmp_path, source, activations=each, dry_run=True).plan for each in ("bf16", "fp8"))
    assert scratch_bytes(fp8).sums == scratch_bytes(floats).sums == 4 * 48 * SLOTS * HIDDEN
    assert weight_bytes_per_step(fp8) == weight_bytes_per_step(floats)
    (rounding,) = (step for step in fp8.steps if step.op == "round_slots_to_fp8")
    told = {each.name: each for each in step_info(fp8)}[rounding.name]
    assert (op_name(rounding), told.nbytes) == ("round_slots_to_fp8", SLOTS * (4 * INNER + 256 + 4 * 2))
    (device, *_) = devices_of("sm_90a")
    fast = dataclasses.replace(device, bandwidth=1e30)  # which operations alone keep busy
    load = Load(sequences=[(0, 40)], logit_rows=40)
    wide, narrow = (
        [each for each in step_ops(plan, fast, load) if each.op.removeprefix("fp8_") in ("moe_gate_up", "moe_down")]
        for plan in (floats, fp8)
    )
    for one, other, last in zip(wide, narrow, ((), ("sum_experts",)), strict=True):
        assert other.operations == one.operations
        assert other.kernels == ("experts_f8f8_wide_64", *last)
        busy = [each.seconds - LAUNCH * each.launches for each in (one, other)]
        np.testing.assert_allclose(busy[0] / busy[1], device.rate_fp8 / device.rate, rtol=1e-6)
