"""Matrix products of FP8 weights with inputs in FP8, by warpgroups and by warps: values at odd shapes, parts of K, and
which launches run."""

import contextlib
import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.passes.base import PassReport
from ingot.builder.passes.round_to_fp8 import RoundToFp8
from ingot.dtypes import DType, to_float32
from ingot.errors import EngineError, TargetError
from ingot.plan import Attr
from ingot.plugins.cuda.bind import ACTIVATIONS
from ingot.plugins.cuda.fp8_products import (
    FP8_KERNELS,
    fp8_launches,
    fp8_parts,
    fp8_shared_bytes,
    fp8_tiles,
    round_launch,
)
from ingot.plugins.cuda.own_products import OwnProduct
from ingot.plugins.cuda.target import CudaTarget
from ingot.plugins.f8_rows import F8Rows, round_inputs
from ingot.plugins.op import Array
from tests.plugins.cpu.one_step import Input, Packed, Quantised, one_step_plan, plain_batch, reference_outputs
from tests.plugins.cuda.conftest import RealDriver
from tests.plugins.cuda.one_step import layout_of, open_gpu, run_step
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.test_own_products import normal
from tests.plugins.cuda.test_wide_products import COUNTS, own
from tests.plugins.ops.calls import random_f8

UNITS = ("sm90a", "sm89")  # warpgroups; warps, whose kernels run on GPUs with warpgroups too
ROWS = (1, 16, 17, 65, 130, 300)
SHAPES = ((33, 8, 0), (70, 304, 0), (66, 177, 1), (300, 520, 0), (2, 1000, 1), (40, 1100, 0))  # n, k, gated
GROUPS = (0, 128)


def take(monkeypatch: pytest.MonkeyPatch, units: str) -> str:
    """The tests' GPU has these kernels alone."""
    monkeypatch.setattr(CudaTarget, "fp8_units", units)
    return units


@pytest.fixture(params=UNITS)
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return take(monkeypatch, request.param)


def product(
    driver: ctypes.CDLL, units: str, group: int, rows: int, shape: tuple[int, int, int], which: int
) -> tuple[Array, Array]:
    """What the kernels and the reference make of the first rows of one input. which: activation and epilogue."""
    n, k, gated = shape
    out, extra = n // 2 if gated else n, which % 4
    scale = np.random.default_rng(n).random(n, np.float32) / np.float32(900)
    weight = dataclasses.replace(random_f8((n, k), group), scale=scale)
    attrs: dict[str, Attr] = {
        "activation": (*ACTIVATIONS,)[which % len(ACTIVATIONS)],
        "gated": gated,
        "activations": "fp8",
        "group": group,
    }
    bias: Input = Packed(values=normal(2, n)) if extra in (1, 3) else None
    residual = normal(3, 400, out)[:rows] if extra in (2, 3) else None
    inputs: list[Input] = [normal(1, 400, k)[:rows], Quantised.of(weight, gated=bool(gated)), bias, residual]
    batch = plain_batch(rows)
    kernel = f"matmul.f8f8.{units}"
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    (found,) = run_step(driver, kernel, inputs, attrs, batch, kv=layout_of(DType.BF16), pieces=1 + which % 2)
    return found, expected


def check(driver: ctypes.CDLL, units: str, group: int, rows: int, shape: tuple[int, int, int], which: int) -> None:
    """Against the reference. Matrix units keep about 14 bits of a step's sum, emulated ones all of float32."""
    found, expected = product(driver, units, group, rows, shape, which)
    scale = max(1.0, float(np.abs(expected).max()))
    bound = 5e-4 if isinstance(driver, RealDriver) else 6e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * scale, err_msg=f"{rows} {shape} {group}")


def test_values(gpu: ctypes.CDLL, units: str) -> None:
    check(gpu, units, 128, 20, (70, 304, 0), 3)


def check_all(driver: ctypes.CDLL, units: str, group: int) -> None:
    """Every kernel with every shape, in a part of the cases."""
    cases = [(rows, shape) for rows in ROWS for shape in SHAPES]
    for which, (rows, shape) in [*enumerate(cases)][group // 64 :: 3]:
        check(driver, units, group, rows, shape, which)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_values(gpu: ctypes.CDLL, units: str, group: int) -> None:
    check_all(gpu, units, group)


def check_inputs(driver: ctypes.CDLL, units: str, group: int, k: int) -> None:
    """To the bit, by a weight that gives each input alone: rows of every size, of zeros, and of what is not finite."""
    x = normal(7, 24, k) * np.exp2(np.linspace(-140, 120, 24, dtype=np.float32))[:, None]
    x[3], x[5, 1], x[6, -1], x[7, : k // 2] = 0, np.nan, -np.inf, 0
    x[8] = np.linspace(-1, 1, k)  # many lie between two numbers
    ones = to_float32(np.arange(256, dtype=np.uint8), DType.F8).tolist().index(1.0)
    weight = F8Rows(
        scale=np.ones(k, np.float32),
        codes=np.eye(k, dtype=np.uint8) * np.uint8(ones),
        group_scale=np.ones((k, -(-k // group)), np.float32) if group else None,
        group=group,
    )
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "fp8", "group": group}
    inputs: list[Input] = [x, Quantised.of(weight), None, None]
    (found,) = run_step(driver, f"matmul.f8f8.{units}", inputs, attrs, plain_batch(24), kv=layout_of(DType.BF16))
    numbers, scale = round_inputs(x, group)
    expected = numbers * np.repeat(scale, group or k, 1)[:, :k]
    if group:  # a sum over all groups
        expected[np.isnan(scale).any(axis=1)] = np.nan
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("group", "k"), [(0, 150), pytest.param(128, 200, marks=pytest.mark.slow)])
def test_inputs_are_rounded_as_specified(gpu: ctypes.CDLL, units: str, group: int, k: int) -> None:
    check_inputs(gpu, units, group, k)


@pytest.mark.parametrize("group", GROUPS)
def test_the_rounding_is_the_reference_of_its_op(gpu: ctypes.CDLL, units: str, group: int) -> None:
    """Codes and scales to the bit, of an odd number of rows, with zeros behind their columns."""
    x, weight, batch = normal(5, 7, 300), random_f8((16, 300), group), plain_batch(7)
    x[2], x[4, 130] = 0, np.inf
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "fp8", "group": group}
    given: list[Input] = [x, Quantised.of(weight), None, None]
    plan, section = one_step_plan(f"matmul.f8f8.{units}", given, attrs, batch, layout_of(DType.BF16))
    expected = reference_outputs(f"round_to_fp8.f32.{units}", [x], {"group": group}, batch)
    with contextlib.closing(open_gpu(plan, section, 1)) as session:
        (begin,) = (each.offset for each in plan.buffers if each.name == "in0")
        session.device.upload(session.addresses.arena + begin, x)
        _, outputs = session.run_tapped(batch, ["step.round_to_fp8"])
    found = list(outputs["step.round_to_fp8"].values())
    assert [each.shape for each in found] == [(7, 384), (7, 3 if group else 1)]
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_a_matmul_that_has_to_round_by_itself_is_refused(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass has made two kernel calls of it, or a session does not open."""
    monkeypatch.setattr(RoundToFp8, "__call__", lambda self, program: (program, PassReport(name="none", fired=0)))
    with pytest.raises(EngineError, match=r"(?s)has a type that cuda targets do not store.*expected: f8.*got: f32"):
        product(gpu, UNITS[0], 0, 1, (33, 8, 0), 0)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_has_the_same_bits_in_batches_of_up_to_256_rows(gpu: ctypes.CDLL, units: str, group: int) -> None:
    """K is cut into as many parts for all of them."""
    for shape, which in (((70, 300, 0), 3), ((66, 172, 1), 7), ((40, 1104, 0), 2)):
        alone, _ = product(gpu, units, group, 1, shape, which)
        for rows in (5, 16, 40, 130):
            found, _ = product(gpu, units, group, rows, shape, which)
            assert found[:1].tobytes() == alone.tobytes(), f"{rows} rows"


def launches(whole: OwnProduct, rows: int, *, wide: bool) -> list[tuple[str, tuple[int, int, int]]]:
    """Those that run, and their grids."""
    least = 1
    all_of = [round_launch(0, 0, 0, k=whole.k, filled=whole.k, group=whole.group, rows=whole.rows)]
    for tile in fp8_tiles(whole.n, whole.k, wide=wide):
        all_of += fp8_launches(whole, 0, tile, range(least, tile.most_rows + 1), 0)
        least = tile.most_rows + 1
    counts = dataclasses.replace(COUNTS, tokens=rows)
    grids = [(each.kernel, each.grid(counts, 1)) for each in all_of]
    return [(kernel, grid) for kernel, grid in grids if min(grid) > 0]


@pytest.mark.parametrize(("wide", "name"), [(True, "product_f8f8_wide"), (False, "product_f8f8")])
def test_one_kernel_computes_each_number_of_rows(wide: bool, name: str) -> None:
    """Behind the one that rounds the inputs. Weights that fill a GPU are not cut."""
    whole, cut = own(28672, 4096, gated=True), own(4096, 4096)
    assert fp8_parts(28672, 4096) == 1
    for rows, tile in ((1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (3000, 128)):
        kernels = [("round_to_fp8", (rows, 1, 1)), (f"{name}_{tile}", (-(-rows // tile), 224, 1))]
        assert launches(whole, rows, wide=wide) == kernels
    grouped = dataclasses.replace(cut, group=128)
    assert launches(grouped, 1, wide=wide) == [
        ("round_to_fp8", (1, 4, 1)),
        (f"{name}_16", (1, 32, 4)),
        ("product_sum", (1, 4, 1)),
    ]
    assert launches(cut, 256, wide=wide)[1:] == [(f"{name}_128", (2, 32, 4)), ("product_sum", (256, 4, 1))]
    assert launches(cut, 257, wide=wide)[1:] == [(f"{name}_128", (3, 32, 1))]


def test_tiles_fit_shared_memory() -> None:
    """Of sm_90a; others also of sm_89 and sm_120. Two tiles of 16 rows of x fit a large one: each takes 1 KiB more."""
    for kernel in FP8_KERNELS:
        assert fp8_shared_bytes(kernel) <= (227 if "wide" in kernel else 99) << 10, kernel
        if kernel.endswith("_16"):
            assert 2 * (fp8_shared_bytes(kernel) + 1024) <= 228 << 10, kernel


FAULTS = {  # of warpgroups: what → (the right text of wide_fp8.cuh, the wrong one, what is said)
    "no barrier before a step": (
        "    meet_groups<kWideThreads>();\n    multiply(tiles, 0);\n",
        "    multiply(tiles, 0);\n",
        "",
    ),
    "no wait for a copy": ("copy_wait<Tile::kAhead - 1>();", "copy_wait<Tile::kAhead + 1>();", ""),
    "codes of the step that is read": (
        "if (step + kCodeStages < end) copy_codes(step + kCodeStages);",
        "if (step + kCodeStages + 1 < end) copy_codes(step + kCodeStages + 1);",
        "",
    ),
    "tiles that are still read": (
        "    meet_groups<kWideThreads>();  // nobody needs the tiles any more\n",
        "",
        "elsewhere",
    ),
    "sums that are not awaited": ("    group_wait<0>(sum);\n", "", "nobody waits for"),
    "what lies behind a panel": ("bool valid = step * kFp8Step + thread < filled;", "bool valid = true;", ""),
    "scales of another step": ("add(p, tiles, step - 1);", "add(p, tiles, step);", ""),
    "sums that go on": ("describe_rows(inputs, i), i > 0);", "describe_rows(inputs, i), true);", ""),
}

OF_GATES = "gates in the place of ups"
OF_WARPS = {  # of warp_fp8.cuh, likewise
    "no barrier before a warp's step": (
        "    __syncthreads();  // this step is there for all, and nobody reads the one before it any more\n",
        "",
        "",
    ),
    "no wait for the copies of a step": ("copy_wait<kAhead - 1>();", "copy_wait<kAhead + 1>();", ""),
    "sums over tiles that are still read": ("  __syncthreads();  // nobody needs the tiles any more\n", "", ""),
    "codes behind a panel": ("bool valid = step * kFp8Step + k < filled;", "bool valid = true;", ""),
    "weights of another line": ("(k / 8 % 2 + panel % 2 * 2)", "(k / 8 % 2 + k / 16 % 2 * 2)", ""),
    "a step that goes on from the one before": ("            if (slice == 0) {\n", "            if (false) {\n", ""),
    OF_GATES: ("i / 16 * (kWideRows / 2) + pair * 16", "pair / 2 * (kWideRows / 2) + pair * 16", ""),
    "scales of the step behind": ("of_row + step * next_scale, there);", "of_row + step / 2, there);", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, *OF_WARPS])
def test_faults_are_seen(
    gpu: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """By an error, or by wrong values."""
    gpu.emulated_set_devices(1)  # a real GPU would not say what is wrong
    of_warps = fault in OF_WARPS
    right, wrong, said = {**FAULTS, **OF_WARPS}[fault]
    plant(monkeypatch, tmp_path, "warp_fp8.cuh" if of_warps else "wide_fp8.cuh", right, wrong)
    units = take(monkeypatch, UNITS[of_warps])
    rows, shape = (12, (66, 1160, 1)) if fault == OF_GATES else (70 if of_warps else 12, (70, 1160, 0))
    with pytest.raises((TargetError, AssertionError)):
        check(gpu, units, 128, rows, shape, 3)
    assert said in capfd.readouterr().err
