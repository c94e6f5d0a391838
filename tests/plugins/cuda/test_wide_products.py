"""Matrix products by the instructions of warpgroups: values at odd shapes, parts of K, and which launches run."""

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.passes.choose_tiles import choose_tiles
from ingot.dtypes import DType
from ingot.errors import TargetError
from ingot.plan import Attr, Rows
from ingot.plugins.cuda.own_products import FEW_ROWS, OwnProduct
from ingot.plugins.cuda.plan_facts import scratch_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.tilings import tiles_of_step
from ingot.plugins.cuda.wide_products import BESIDE_LIBRARY, TYPES, multiplies, parts_of, wide_launches, wide_tiles
from ingot.plugins.cuda.work import ANY_ROWS, Launch
from tests.plugins.cpu.one_step import Input, Packed, one_step_plan, plain_batch
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.test_own_products import KEPT_TYPES, check_numbers, product
from tests.spanning import often

ROWS = (17, 64, 65, 130, 300)
SHAPES = ((33, 8, 0), (70, 304, 0), (66, 176, 1), (300, 520, 0), (2, 1000, 1))  # n, k, gated


def check(driver: ctypes.CDLL, precision: str, rows: int, shape: tuple[int, int, int], which: int) -> None:
    """Against the reference."""
    found, expected = product(driver, precision, rows, shape, which, "sm90a")
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=6e-6 * scale, err_msg=f"{rows} {shape}")


def check_all(driver: ctypes.CDLL, precision: str, every: int = 1) -> None:
    """Every kernel with every shape; every: only each so many of the cases."""
    cases = [(rows, shape) for rows in ROWS for shape in SHAPES]
    for which, (rows, shape) in [*enumerate(cases)][::every]:
        check(driver, precision, rows, shape, which)


def test_values(gpu: ctypes.CDLL) -> None:
    check(gpu, "bf16", 20, (70, 304, 0), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    often(("bf16", "f16", "w8", "w4g32", "w4g64", "w4g128", *KEPT_TYPES), ("bf16", "w4g32", "w4ts", "w8t", "f8")),
)
def test_all_values(gpu: ctypes.CDLL, precision: str) -> None:
    check_all(gpu, precision, 1 if precision == "bf16" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", KEPT_TYPES)
@pytest.mark.parametrize("rows", [20, 150])
def test_kept_codes_are_the_numbers_of_the_specification(gpu: ctypes.CDLL, precision: str, rows: int) -> None:
    """To the bit."""
    check_numbers(gpu, precision, rows, "sm90a")


def own(n: int, k: int, *, gated: bool = False) -> OwnProduct:
    zeros = dict.fromkeys(("y", "x", "weight", "bias", "residual", "counts", "kind", "group"), 0)
    return OwnProduct(n=n, k=k, gated=gated, narrow=False, dtype=DType.BF16, rows=Rows.TOKENS, **zeros)


COUNTS = Counts(tokens=0, logit_rows=0, sequences=0, decode=0, prefill=0, longest=0)


def run_for(rows: int, product: OwnProduct, most: int = ANY_ROWS) -> list[tuple[str, tuple[int, int, int]]]:
    """The launches that run, and their grids."""
    counts = dataclasses.replace(COUNTS, tokens=rows)
    grids = [(each.kernel, each.grid(counts, 1)) for each in launches(product, most)]
    return [(kernel, grid) for kernel, grid in grids if min(grid) > 0]


def launches(product: OwnProduct, most: int = ANY_ROWS) -> Iterator[Launch]:
    """Of the tiles that a plan states."""
    least = FEW_ROWS + 1
    for tile in wide_tiles(product.n, product.k, product.dtype, most):
        yield from wide_launches(product, tile, range(least, tile.most_rows + 1), 0)
        least = tile.most_rows + 1


def test_one_kernel_computes_each_number_of_rows() -> None:
    """Weights that fill a GPU are not cut; the sums of parts are added behind."""
    whole, cut = own(28672, 4096, gated=True), own(2048, 2048)
    assert parts_of(28672, 4096) == 1
    assert run_for(16, whole) == []
    assert run_for(17, whole) == run_for(64, whole) == [("product_wide_64", (1, 224, 1))]
    assert run_for(65, whole) == [("product_wide_128", (1, 224, 1))]
    assert run_for(3000, whole) == [("product_wide_128", (24, 224, 1))]
    assert run_for(BESIDE_LIBRARY + 1, whole, BESIDE_LIBRARY) == []
    assert run_for(64, cut) == [("product_wide_64", (1, 16, 8)), ("product_sum", (64, 2, 1))]
    assert run_for(200, cut) == [("product_wide_128", (2, 16, 8)), ("product_sum", (200, 2, 1))]
    assert run_for(257, cut) == [("product_wide_128", (3, 16, 1))]
    codes = dataclasses.replace(cut, dtype=DType.W4)
    assert [run_for(rows, codes)[0][0] for rows in (64, 128, 129, 5000)] == [
        "product_w4_wide_64",
        "product_w4_wide_128",
        *["product_w4_wide_256"] * 2,
    ]
    assert run_for(200, codes)[1] == ("product_sum", (200, 2, 1))
    kept = dataclasses.replace(whole, dtype=DType.W4TS)
    assert [run_for(rows, kept) for rows in (64, 128, 2048)] == [
        [("product_w4ts_wide_64", (1, 224, 1))],
        [("product_w4ts_wide_128", (1, 224, 1))],
        [("product_w4ts_wide_256", (8, 224, 1))],
    ]


def test_parts_have_room_for_their_sums() -> None:
    """As many as the tiles of the plan cut K into, for as many rows."""
    assert parts_of(2048, 300) == 1  # a part has a few steps
    weight = Packed(values=np.zeros((256, 1024), np.float32), dtype=DType.BF16)
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "bf16", "group": 0}
    for rows, parts in ((300, 4 * 256), (40, 4 * 40), (16, 0)):
        inputs: list[Input] = [np.zeros((rows, 1024), np.float32), weight, None, None]
        plan, _ = one_step_plan("matmul.bf16.sm90a", inputs, attrs, plain_batch(rows))
        made, _ = choose_tiles(plan, tiles_of_step)
        assert scratch_bytes(made).sums == 4 * parts * 256
        assert scratch_bytes(plan).sums == 0


def test_tiles_fit_shared_memory() -> None:
    """Of codes, two tiles of 64 rows of x fit a multiprocessor: each takes 1 KiB more."""
    for dtype in TYPES:
        for each in launches(dataclasses.replace(own(128, 64), dtype=dtype)):
            assert each.shared <= 227 << 10, each.kernel
            if dtype.is_quantised and each.kernel.endswith("_64"):
                assert 2 * (each.shared + 1024) <= 228 << 10, each.kernel


def test_rows_of_odd_lengths_keep_the_other_kernels(gpu: ctypes.CDLL) -> None:
    """Copies move 16 bytes at a time."""
    assert [multiplies(k, DType.W8) for k in (8, 300, 304)] == [True, False, True]
    assert not multiplies(64, DType.F32)
    assert not multiplies(64, DType.I8)
    check(gpu, "bf16", 20, (33, 12, 0), 0)


WIDE_FAULTS = {  # what → (weights, file, the right text, the wrong one, what is said)
    "no barrier before a step": (
        "bf16",
        "wide_products.cuh",
        "meet_groups<kWideThreads>();  // this step is there",
        "// this step is there",
        "elsewhere",
    ),
    "no wait for a copy": (
        "bf16",
        "wide_products.cuh",
        "copy_wait<Shape::kAhead - 1>();",
        "copy_wait<Shape::kAhead>();",
        "",
    ),
    "no wait for the sums": ("bf16", "wide_products.cuh", "    group_wait<0>(sum);\n", "", "nobody waits for"),
    "no wait for codes": (
        "w4ts",
        "wide_kept.cuh",
        "copy_wait<Tile::kAhead - 1>();",
        "copy_wait<Tile::kAhead + 1>();",
        "",
    ),
    "codes of the step that is read": (
        "w4ts",
        "wide_kept.cuh",
        "if (step + kCodeStages < end) copy_codes(step + kCodeStages);",
        "if (step + kCodeStages + 1 < end) copy_codes(step + kCodeStages + 1);",
        "",
    ),
    "tiles that are still read": (
        "w4ts",
        "wide_kept.cuh",
        "    meet_groups<kWideThreads>();  // nobody needs the tiles any more\n",
        "",
        "elsewhere",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", WIDE_FAULTS)
def test_faults_are_seen(
    gpu: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """By an error, or by wrong values."""
    gpu.emulated_set_devices(1)  # a real GPU would not say what is wrong
    precision, file, right, wrong, said = WIDE_FAULTS[fault]
    plant(monkeypatch, tmp_path, file, right, wrong)
    with pytest.raises((TargetError, AssertionError)):
        check(gpu, precision, 20, (70, 520, 0), 3)
    assert said in capfd.readouterr().err
