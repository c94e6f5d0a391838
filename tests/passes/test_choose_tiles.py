"""Which kernels compute matmuls for few and for many rows: what the plan states, and what sessions refuse."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.builder.passes.choose_tiles import choose_tiles
from ingot.builder.pipeline import plan_passes
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr, Plan
from ingot.plan_check import check_plan
from ingot.plan_json import plan_from_json
from ingot.plan_tiles import Tile, Tiling
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.estimate import _nowhere
from ingot.plugins.cuda.plan_facts import scratch_bytes
from ingot.plugins.cuda.tilings import tiles_of_step
from ingot.plugins.registry import find_target
from tests.plugins.cpu.one_step import Input, Packed, one_step_plan, plain_batch


def matmul(kernel: str, rows: int, n: int, k: int, *, gated: int = 0) -> Plan:
    """A plan of one matmul, whose input is rounded already."""
    dtype = DType(kernel.split(".")[1])
    weight = Packed(values=np.zeros((n, k), np.float32), dtype=dtype)
    attrs: dict[str, Attr] = {"activation": "none", "gated": gated, "activations": dtype.value, "group": 0}
    inputs: list[Input] = [np.zeros((rows, k), np.float32), weight, None, None]
    plan, _ = one_step_plan(kernel, inputs, attrs, plain_batch(rows))
    buffers = (dataclasses.replace(each, dtype=dtype if each.name == "in0" else each.dtype) for each in plan.buffers)
    made, report = choose_tiles(dataclasses.replace(plan, buffers=tuple(buffers)), tiles_of_step)
    assert (report.name, report.fired, report.refused) == ("choose_tiles", 1, {})
    return made


def tiles(plan: Plan) -> list[str]:
    (tiling,) = plan.tilings
    assert tiling.steps == ("step",)
    return [str(each) for each in tiling.tiles]


def test_matmuls_have_kernels_for_few_and_many_rows() -> None:
    assert tiles(matmul("matmul.bf16.sm80", 300, 64, 64)) == [
        "product_8_half up to 8 rows",
        "product_16_half up to 16 rows",
        "product_64 up to 64 rows",
        "product_128 up to 300 rows",
    ]
    assert tiles(matmul("matmul.bf16.sm80", 9, 64, 64, gated=1)) == [
        "product_8 up to 8 rows",
        "product_16 up to 9 rows",
    ], "as many as the largest step needs"
    assert tiles(matmul("matmul.bf16.sm80.cublaslt", 300, 64, 64))[2:] == ["cuBLASLt up to 300 rows"]
    assert tiles(matmul("matmul.f32.sm80.cublaslt", 300, 64, 64)) == [
        "product_f32 (tiles of 16 rows) up to 16 rows",
        "cuBLASLt up to 300 rows",
    ]


def test_warpgroups_cut_k_of_small_weights() -> None:
    """For up to 256 rows, into parts of at least four steps of 64 columns."""
    assert tiles(matmul("matmul.bf16.sm90a", 300, 64, 1024))[2:] == [
        "product_wide_64 in 4 parts up to 64 rows",
        "product_wide_128 in 4 parts up to 256 rows",
        "product_wide_128 up to 300 rows",
    ]
    assert tiles(matmul("matmul.bf16.sm90a.cublaslt", 300, 64, 1024))[2:] == [
        "product_wide_64 in 4 parts up to 64 rows",
        "product_wide_128 in 4 parts up to 128 rows",
        "cuBLASLt up to 300 rows",
    ]
    assert tiles(matmul("matmul.bf16.sm90a", 300, 64, 1020))[2:] == [
        "product_64 up to 64 rows",
        "product_128 up to 300 rows",
    ], "rows of x are copied 16 bytes at a time"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a model with experts."""
    folder = tmp_path_factory.mktemp("mixtral")
    (folder / "config.json").write_text(json.dumps(dict(find_family("mixtral").tiny)))
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    options = BuildConfig(target="cuda/sm90", precision="bf16", dry_run=True)
    return build(options, folder / "c", folder / "e").plan


def test_steps_that_are_computed_alike_stand_together(plan: Plan) -> None:
    check_plan(plan)
    assert plan_from_json(plan.to_json()) == plan
    assert plan.tiles_of("layers.0/qkv") == plan.tiles_of("layers.0/attention_out")
    assert [(each.kernel, each.rows) for each in plan.tiles_of("layers.0/moe_gate_up.sort_by_expert")] == [
        ("group_by_expert", rows) for rows in (8, 64, 128)
    ]
    for step in ("layers.0/moe_gate_up", "layers.0/moe_down"):
        both = zip(plan.tiles_of(step), plan.tiles_of("layers.0/moe_gate_up.sort_by_expert"), strict=True)
        assert all((one.rows, one.most_rows) == (other.rows, other.most_rows) for one, other in both)
    assert plan.tiles_of("layers.0/attention_norm") == ()


def test_other_targets_have_no_such_pass() -> None:
    def names(target: str) -> list[str]:
        return [getattr(each, "func", each).__name__ for each in plan_passes(find_target(target))]

    assert "choose_tiles" in names("cuda/sm80")
    for target in ("ref", "cpu/avx2", "tensorrt-rtx/sm89"):
        assert "choose_tiles" not in names(target)


Change = Callable[[Tiling], tuple[Tiling, ...]]


def of_tiles(*found: Tile) -> Change:
    return lambda tiling: (dataclasses.replace(tiling, tiles=found),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda each: (each, each), "layers.0/qkv has tiles twice"),
        (lambda each: (dataclasses.replace(each, steps=("other",)),), "there is no kernel call other"),
        (lambda each: (dataclasses.replace(each, tiles=each.tiles[::-1]),), "expected more and more up to 2048"),
        (lambda each: (dataclasses.replace(each, tiles=each.tiles[:-1]),), "expected more and more up to 2048"),
        (lambda each: (dataclasses.replace(each, tiles=()),), r"tiles for \[\] rows"),
    ],
)
def test_odd_tilings_are_refused(plan: Plan, change: Change, words: str) -> None:
    first, *others = plan.tilings
    with pytest.raises(EngineError, match=rf"tilings(.|\n)*{words}"):
        check_plan(dataclasses.replace(plan, tilings=(*change(first), *others)))


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ("matmul.bf16.sm80", Tile(most_rows=300, kernel="product_16", rows=16)),
        ("matmul.bf16.sm80", Tile(most_rows=300, kernel="product_128", rows=64)),
        ("matmul.bf16.sm80", Tile(most_rows=300, kernel="product_128", rows=128, parts=2)),
        ("matmul.bf16.sm80", Tile(most_rows=300, kernel="product_wide_128", rows=128)),
        ("matmul.bf16.sm80", Tile(most_rows=300, kernel="cuBLASLt")),
        ("matmul.bf16.sm90a", Tile(most_rows=300, kernel="product_wide_128", rows=128, parts=17)),
        ("matmul.bf16.sm90a", Tile(most_rows=300, kernel="product_w8_wide_128", rows=128)),
    ],
)
def test_kernels_that_do_not_compute_a_step_are_refused(kernel: str, found: Tile) -> None:
    plan = matmul(kernel, 300, 64, 1024)
    bind(plan, _nowhere(plan))
    changed = dataclasses.replace(plan, tilings=of_tiles(found)(plan.tilings[0]))
    with pytest.raises(EngineError, match=r"does not compute a product, or not in such tiles(.|\n)*kernel call step"):
        bind(changed, _nowhere(changed))


def test_a_plan_without_tiles_is_refused() -> None:
    plan = dataclasses.replace(matmul("matmul.bf16.sm80", 300, 64, 64), tilings=())
    with pytest.raises(EngineError, match="does not say which kernels compute a product"):
        bind(plan, _nowhere(plan))


def test_what_executes_is_what_the_plan_says() -> None:
    """Other tiles, other launches, and other scratch memory."""
    plan = matmul("matmul.bf16.sm90a", 300, 64, 1024)
    found = Tile(most_rows=300, kernel="product_wide_64", rows=64, parts=2)
    changed = dataclasses.replace(plan, tilings=of_tiles(found)(plan.tilings[0]))
    (bound,) = bind(changed, _nowhere(changed))
    assert [getattr(each, "kernel", "") for each in bound.work] == ["product_wide_64", "product_sum"]
    assert (scratch_bytes(plan).sums, scratch_bytes(changed).sums) == (4 * 4 * 256 * 64, 4 * 2 * 300 * 64)


def test_a_dry_run_refuses_what_a_build_would(tmp_path: Path) -> None:
    """Codes are multiplied with bf16, and the experts' routers of this checkpoint are float32."""
    (tmp_path / "config.json").write_text(json.dumps(dict(find_family("mixtral").tiny)))
    convert(
        ConvertOptions(config=tmp_path / "config.json", random_weights=1, dtype=DType.F32, output_dir=tmp_path / "c")
    )
    options = BuildConfig(target="cuda/sm90", precision="w8", activations="bf16", dry_run=True)
    with pytest.raises(EngineError, match=r"one float type for all(.|\n)*f32, w8(.|\n)*--dtype bf16"):
        build(options, tmp_path / "c", tmp_path / "e")
