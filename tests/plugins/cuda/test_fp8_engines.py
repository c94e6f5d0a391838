"""Engines whose matmuls have FP8 weights and inputs, on the emulated GPU: every layer, and steps of several sequences,
against `ref` on the same plan. What has no such kernels is refused."""

import contextlib
import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ingot.bench.kernels import op_name
from ingot.builder.build import BuildReport, build
from ingot.builder.select import choose_kernel
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import NoKernelError, UsageError
from ingot.plugins.cuda.devices import LAUNCH, devices_of
from ingot.plugins.cuda.estimate import step_ops
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import SessionOptions
from ingot.step_table import short_table, step_info
from ingot.step_work import Load
from tests import quantised as write
from tests.plugins.cuda.decode_steps import BLOCKS, SEQUENCES, compare_decode

Kind = tuple[dict[str, object], tuple[int, int], str]  # settings of the checkpoint, block, name of the scales
ROWS: Kind = {"quant_method": "fbgemm_fp8"}, (1, 0), "weight_scale"
BLOCKS_OF_128: Kind = {"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128), "weight_scale_inv"
BLOCKS_OF_32: Kind = {"quant_method": "fp8", "weight_block_size": [32, 32]}, (32, 32), "weight_scale_inv"
INNER = 304  # columns of down: more than two groups
UNITS = {"cuda/sm90": ("sm90a", "sm90a"), "cuda/sm89": ("sm89", "sm80")}  # of the kernels of FP8, of w8


def checkpoint(folder: Path, kind: Kind = BLOCKS_OF_128) -> Path:
    settings, block, name = kind
    products = {
        each: tuple(INNER if size == write.INNER else size for size in shape) for each, shape in write.PRODUCTS.items()
    }
    write.write_model(
        folder / "model",
        settings,
        write.bytes_with_scale(DType.F8, name, block),
        config={"intermediate_size": INNER},
        products=products,  # type: ignore[arg-type]
    )
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


def built(folder: Path, source: Path, **options: object) -> BuildReport:
    given = {"target": "cuda/sm90", "activations": "fp8", **options}
    config = BuildConfig(tokens_per_block=16, max_num_tokens=48, max_batch_size=SEQUENCES, **given)  # type: ignore[arg-type]
    return build(config, source, folder / "engine")


def kernels(report: BuildReport) -> dict[str, tuple[str, object]]:
    """Of each matmul, and the columns of its groups."""
    return {
        step.name.rpartition("/")[2]: (step.kernel, step.attrs["group"])
        for step in report.plan.steps
        if find_op(step.op).is_matmul
    }


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda/sm90", "cuda/sm89"])
@pytest.mark.parametrize("kind", [ROWS, BLOCKS_OF_128], ids=["rows", "blocks"])
def test_an_engine(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, target: str) -> None:
    """Of blocks, matmuls of no more than 128 columns have a scale for each row. Attention is exact: the last bit of a
    bf16 would choose other numbers of FP8, and logits differ by percents."""
    gpu.emulated_set_devices(1)  # which is of any architecture
    monkeypatch.setenv("INGOT_EMULATED_SM", target.removeprefix("cuda/sm"))
    report = built(tmp_path, checkpoint(tmp_path, kind), target=target, kv_cache_dtype="f32")
    fp8, w8 = UNITS[target]
    group = 0 if kind is ROWS else 128
    assert kernels(report) == {
        **dict.fromkeys(("qkv", "attention_out", "gate_up"), (f"fp8_matmul.f8f8.{fp8}", 0)),
        "down": (f"fp8_matmul.f8f8.{fp8}", group),
        "lm_head": (f"matmul.w8.{w8}", 0),
    }
    compare(tmp_path / "engine", tmp_path / "checkpoint", CompareOptions(tokens=40)).raise_if_wrong()
    engine = open_engine(tmp_path / "engine")
    options = SessionOptions(num_blocks=engine.plan.in_each(BLOCKS))
    with contextlib.closing(find_target(target).open_session(engine.plan, engine.weights, options)) as session:
        compare_decode(session, engine, (5, 1), 1e-4)


def test_every_gpu_whose_matrix_units_multiply_fp8_has_kernels(tmp_path: Path) -> None:
    """By warps, but for cuda/sm90; the machine code has them beside none of warpgroups."""
    source = checkpoint(tmp_path)
    for target in ("cuda/sm89", "cuda/sm100", "cuda/sm120"):
        plan = built(tmp_path, source, target=target, dry_run=True).plan
        found = {step.op: step.kernel for step in plan.steps if step.op in ("fp8_matmul", "round_to_fp8")}
        assert found == {"fp8_matmul": "fp8_matmul.f8f8.sm89", "round_to_fp8": "round_to_fp8.f32.sm89"}
        assert (specialisation(plan).fp8, specialisation(plan).wide) == (True, False)
        tiles = {tile.kernel for step in plan.steps if step.op == "fp8_matmul" for tile in plan.tiles_of(step.name)}
        assert tiles == {"product_f8f8_16", "product_f8f8_64"}, "48 tokens at most"


def test_what_has_no_kernels_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    for target in ("cuda/sm80", "cuda/sm86", "cpu/avx2"):
        with pytest.raises(NoKernelError, match=f"target {target} has no kernel for op matmul with FP8 activations"):
            built(tmp_path, source, target=target, dry_run=True)
    with pytest.raises(UsageError, match="FP8 activations are supported only with FP8 weights"):
        built(tmp_path, source, precision="w8", dry_run=True)
    with pytest.raises(NoKernelError, match="cuda/sm80 has no kernel for op moe_down with FP8 activations"):
        choose_kernel(find_target("cuda/sm80"), "moe_down", "f8f8", "fp8")
    (tmp_path / "small").mkdir()
    with pytest.raises(UsageError, match=r"(?s)FP8 activations are supported only with FP8 weights.*got: f8g32"):
        built(tmp_path, checkpoint(tmp_path / "small", BLOCKS_OF_32), dry_run=True)


def test_inspect_and_bench_list_the_rounding(tmp_path: Path) -> None:
    """One row of 304 inputs: float32, then codes in lines of 128 and three scales. The matmul reads what it wrote."""
    plan = built(tmp_path, checkpoint(tmp_path), dry_run=True).plan
    (rounding, matmul) = (step for step in plan.steps if "layers.0/down" in step.name)
    told = {each.name: each for each in step_info(plan)}[rounding.name]
    assert (told.kernel, told.nbytes) == ("round_to_fp8.f32.sm90a", 4 * INNER + 384 + 4 * 3)
    assert (op_name(rounding), op_name(matmul)) == ("round_to_fp8", "down")
    assert matmul.inputs[:2] == rounding.outputs
    assert "round_to_fp8.f32.sm90a" in "\n".join(short_table(plan, step_info(plan)))


def test_auto_keeps_floats(tmp_path: Path) -> None:
    report = built(tmp_path, checkpoint(tmp_path), activations="auto", dry_run=True)
    assert kernels(report)["down"] == ("matmul.f8.sm90a", 128)
    assert not specialisation(report.plan).fp8


def test_ref_computes_what_the_option_says(tmp_path: Path) -> None:
    """Rounding costs an engine little, and verify knows how much."""
    report = built(tmp_path, checkpoint(tmp_path), target="ref")
    assert kernels(report)["down"] == ("matmul.f8f8.ref", 128)
    found = compare(tmp_path / "engine", tmp_path / "checkpoint", CompareOptions(tokens=40))
    found.raise_if_wrong()


@pytest.mark.parametrize(
    ("target", "code", "kernel", "faster"),
    [
        ("cuda/sm90", "sm_90a", "product_f8f8_wide_64", True),
        ("cuda/sm89", "sm_89", "product_f8f8_64", True),
        ("cuda/sm100", "sm_100", "product_f8f8_64", False),
    ],
)
def test_an_estimate_takes_the_rate_of_fp8(
    tmp_path: Path, target: str, code: str, kernel: str, *, faster: bool
) -> None:
    """For a prompt that fills the matrix units; a kernel call more rounds the inputs of each matmul. The machine code
    of sm_100 multiplies in 16 bits."""
    source = checkpoint(tmp_path)
    floats, fp8 = (
        built(tmp_path, source, target=target, activations=each, dry_run=True).plan for each in ("bf16", "fp8")
    )
    (device, *_) = devices_of(code)
    assert specialisation(fp8).fp8
    assert "-DINGOT_FP8" in specialisation(fp8).macros
    fast = dataclasses.replace(device, bandwidth=1e30)  # which operations alone keep busy
    load = Load(sequences=[(0, 40)], logit_rows=40)
    every = [[*step_ops(plan, fast, load)] for plan in (floats, fp8)]
    ops = [
        [each for each in every[0] if each.op == "matmul"][:-1],
        [each for each in every[1] if each.op == "fp8_matmul"],
    ]
    assert [len(each) for each in ops] == [4, 4]
    rounding = [each for each in every[1] if each.op == "round_to_fp8"]
    assert [(each.kernels, each.launches) for each in rounding] == [(("round_to_fp8",), 1)] * 4
    for wide, narrow in zip(*ops, strict=True):
        assert narrow.operations == wide.operations
        assert narrow.kernels[:1] == (kernel,)
        busy = [each.seconds - LAUNCH * each.launches for each in (wide, narrow)]
        np.testing.assert_allclose(busy[0] / busy[1], device.rate_fp8 / device.rate if faster else 1, rtol=1e-6)
