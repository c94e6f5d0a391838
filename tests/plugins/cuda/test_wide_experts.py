"""Matrix products of experts by the instructions of warpgroups: values at odd shapes, which launches run, and the same
bits for a row in tiles of one size."""

import ctypes
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.errors import TargetError
from ingot.plan import Rows
from ingot.plugins.cuda.devices import devices_of
from ingot.plugins.cuda.estimate import step_ops
from ingot.plugins.cuda.experts import ExpertProduct, Taken, expert_launch, expert_tiles
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.wide_products import TYPES, multiplies
from ingot.plugins.cuda.work import Launch
from ingot.step_work import Load
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.test_experts import DOWN, GATE_UP, PRECISIONS, product
from tests.spanning import often

ROWS = (20, 110)  # of 3 experts, of which each row takes two: tiles of 64 rows, of 128
SHAPES = ((33, 8), (150, 304), (72, 520))  # n, k
WIDE = ("f16", *(each for each in PRECISIONS if each != "f32"))


def check(driver: ctypes.CDLL, op: str, precision: str, rows: int, shape: tuple[int, int], which: int) -> None:
    """Against the reference. Limits of gates are about as large as the sums, so that the tolerance is too."""
    (n, k), limit = shape, 1.5 if precision in ("bf16", "f16") else 30.0
    found, expected = product(driver, op, precision, rows, n=n, k=k, which=which, kind="sm90a", limit=limit)
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=8e-6 * scale, err_msg=f"{rows} {shape} {which}")


def check_all(driver: ctypes.CDLL, op: str, precision: str) -> None:
    """Tiles of both sizes, each shape; biases, gates and clamped gates in turn."""
    for which, shape in enumerate(SHAPES):
        for at, rows in enumerate(ROWS):
            check(driver, op, precision, rows, shape, which + 3 * at)


def test_values(gpu: ctypes.CDLL) -> None:
    """A clamped gate with biases, of which four neighbours are finished at once."""
    check(gpu, GATE_UP, "bf16", 20, (72, 304), 5)


@pytest.mark.slow
@pytest.mark.parametrize("op", [GATE_UP, DOWN])
@pytest.mark.parametrize("precision", often(WIDE, ("bf16", "w4g32", "w4tsg16", "f8")))
def test_all_values(gpu: ctypes.CDLL, op: str, precision: str) -> None:
    check_all(gpu, op, precision)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "precision"), [(GATE_UP, "w4g32"), (DOWN, "bf16")])
def test_a_row_has_the_same_bits_in_tiles_of_one_size(gpu: ctypes.CDLL, op: str, precision: str) -> None:
    """Whatever other rows the step has: they are in other places of a tile then."""
    few, more = (product(gpu, op, precision, rows, n=20, k=304, which=1, kind="sm90a")[0] for rows in (20, 70))
    assert few.tobytes() == more[:20].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("op", "precision"), [(GATE_UP, "bf16"), (DOWN, "w8tg64")])
def test_a_single_expert_and_many_without_rows(gpu: ctypes.CDLL, op: str, precision: str) -> None:
    for rows, experts, slots in ((150, 1, 1), (9, 5, 5), (200, 17, 6)):
        found, expected = product(
            gpu, op, precision, rows, n=9, k=24, which=1, experts=experts, slots=slots, kind="sm90a"
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=8e-6 * max(1.0, float(np.abs(expected).max())))


EXPERTS, SLOTS = 32, 4  # of gpt-oss-20b
TAKEN = Taken(ids=0, counts=0, lists=0, experts=EXPERTS, slots=SLOTS, rows=Rows.TOKENS, most=8192)
COUNTS = Counts(tokens=0, logit_rows=0, sequences=0, decode=0, prefill=0, longest=0)


def own(k: int, dtype: DType = DType.BF16) -> ExpertProduct:
    zeros = dict.fromkeys(("y", "x", "weight", "bias", "kind", "group"), 0)
    return ExpertProduct(n=5760, k=k, each=SLOTS, gated=True, narrow=True, dtype=dtype, **zeros)


def launches_of(product: ExpertProduct, *, wide: bool = True) -> list[Launch]:
    """Of the tiles that a plan states."""
    found, least = list[Launch](), 1
    wide = wide and multiplies(product.k, product.dtype)
    for tile in expert_tiles(EXPERTS, SLOTS, product.dtype, wide=wide):
        found.append(expert_launch(product, TAKEN, tile, range(least, tile.most_rows + 1)))
        least = tile.most_rows + 1
    return found


def run_for(rows: int, product: ExpertProduct, *, wide: bool = True) -> list[tuple[str, tuple[int, int, int], int]]:
    """The launches that run, their grids and threads."""
    counts = dataclasses.replace(COUNTS, tokens=rows)
    launches = [(each.kernel, each.grid(counts, 1), each.threads) for each in launches_of(product, wide=wide)]
    return [each for each in launches if min(each[1]) > 0]


def test_tiles_of_many_rows_go_to_warpgroups() -> None:
    """The grid depends on the number of rows alone."""
    assert run_for(32, own(2880)) == [("experts_8", (180, 48, 1), 256)]
    assert run_for(33, own(2880)) == [("experts_wide_64", (132 // 64 + EXPERTS, 45, 1), 384)]
    assert run_for(2048, own(2880)) == [("experts_wide_128", (64 + EXPERTS, 45, 1), 384)]
    assert run_for(2048, own(2880, DType.W4TS))[0][0] == "experts_w4ts_wide_128"
    assert run_for(2048, own(2880), wide=False) == [("experts_128", (64 + EXPERTS, 45, 1), 256)]


def test_other_rows_and_types_keep_the_other_kernels() -> None:
    """Copies move 16 bytes at a time; float32 has no matrix instructions."""
    assert run_for(2048, own(2884))[0][0] == "experts_128"
    assert run_for(2048, own(2880, DType.F32))[0][0] == "experts_f32"


def test_tiles_fit_shared_memory() -> None:
    """Of codes, two tiles of 64 rows fit a multiprocessor: each takes 1 KiB more."""
    for dtype in TYPES:
        _, few, many = launches_of(own(2880, dtype))
        assert max(few.shared, many.shared) <= 227 << 10
        if dtype.is_quantised:
            assert 2 * (few.shared + 1024) <= 228 << 10


def test_the_plan_names_them(tmp_path: Path) -> None:
    """Where bits may depend on the batch."""
    config = {**find_family("gpt_oss").tiny, "head_dim": 16, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    (device, *_) = devices_of("sm_90a")
    for own, name, kernel in ((True, "sm80", "experts_128"), (False, "sm90a", "experts_wide_128")):
        options = BuildConfig(target="cuda/sm90", precision="bf16", gemm_library=not own, dry_run=True)
        plan = build(options, tmp_path / "c", tmp_path / "e").plan
        assert {step.kernel for step in plan.steps if step.op in (GATE_UP, DOWN)} == {
            f"{op}.bf16.{name}" for op in (GATE_UP, DOWN)
        }
        ops = step_ops(plan, device, Load(sequences=[(0, 2048)], logit_rows=1))
        assert (kernel, "sum_experts") in {each.kernels for each in ops if each.op == DOWN}


FAULTS = {  # what → (file, the right text, the wrong one)
    "results in the order of the list": (
        "tile_sums.cuh",
        "p.to.write_four(p.target(row), col, of, gated);",
        "p.to.write_four(row, col, of, gated);",
    ),
    "rows behind those of the tile": (
        "tile_sums.cuh",
        "if (row >= p.rows || col >= cols) continue;",
        "if (col >= cols) continue;",
    ),
    "rows in the order of the step": ("wide_products.cuh", "kStages, RowsOfList>)", "kStages, RowsInOrder>)"),
    "the gate is not clamped": ("epilogue.cuh", "const bool clamps = gated && limit > 0.f;", "const bool clamps = 0;"),
    "the weight of the first expert": ("products.cu", "tile.expert * bytes", "0 * bytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    """By an error, or by wrong values."""
    gpu.emulated_set_devices(1)  # a real GPU would not say what is wrong
    file, right, wrong = FAULTS[fault]
    plant(monkeypatch, tmp_path, file, right, wrong)
    with pytest.raises((TargetError, AssertionError)):
        check(gpu, GATE_UP, "bf16", 20, (72, 304), 5)
