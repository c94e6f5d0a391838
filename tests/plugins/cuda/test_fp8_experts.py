"""Matrix products of experts with FP8 weights and inputs in FP8, by warpgroups and by warps: values at odd shapes, the
same bits for a row in every batch, and which launches run."""

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
from ingot.plugins.cuda.experts import expert_kernels, expert_launch, expert_tiles, sort_tiles
from ingot.plugins.cuda.fp8_products import fp8_shared_bytes, round_launch
from ingot.plugins.cuda.work import Launch
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.op import Array
from tests.plugins.cpu.one_step import Input, Packed, Quantised, plain_batch, reference_outputs
from tests.plugins.cuda.conftest import RealDriver
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.test_experts import DOWN, GATE_UP, _ids
from tests.plugins.cuda.test_fp8_products import UNITS, take, units
from tests.plugins.cuda.test_own_products import normal
from tests.plugins.cuda.test_wide_experts import COUNTS, EXPERTS, SLOTS, TAKEN, own
from tests.plugins.ops.calls import random_f8

__all__ = ["units"]  # the fixture

ROWS = (5, 40, 110)  # of 3 experts, of which each row takes two: tiles of 8 rows, of 64, of 128
SHAPES = ((33, 8), (70, 304), (36, 520))  # n, k
GROUPS = (0, 128)
OPS = (GATE_UP, DOWN)
NAMES = [(True, "f8f8_wide"), (False, "f8f8")]  # whether by warpgroups; of the kernels


def product(
    driver: ctypes.CDLL,
    units: str,
    op: str,
    group: int,
    rows: int,
    shape: tuple[int, int],
    which: int,
    *,
    experts: int = 3,
    slots: int = 2,
    exact: bool = False,
) -> tuple[Array, Array]:
    """What kernels and reference make of the first rows of one input. which: bias and gate; exact: `exact_inputs`."""
    (n, k), gated, biased = shape, op == GATE_UP and which % 3 > 0, which % 2 == 1
    size = experts, 2 * n if gated else n, k
    scale = np.random.default_rng(n).random(size[:2], np.float32) / np.float32(900)
    rows_of_weight, x = random_f8(size, group), normal(1, 200, k if op == GATE_UP else slots * k)
    if exact:
        rows_of_weight, x = exact_inputs(rows_of_weight, x)
    weight = Quantised.of(dataclasses.replace(rows_of_weight, scale=scale), gated=gated)
    bias: Input = Packed(values=normal(3, experts * size[1])) if biased else None
    attrs: dict[str, Attr] = {"activations": "fp8", "group": group}
    ids = _ids(200, experts, slots)[:rows]
    inputs: list[Input] = [x[:rows], ids, weight, bias, None]
    if op == DOWN:
        inputs.insert(2, np.abs(normal(2, 200, slots))[:rows])
    else:
        clamped = {"limit": 1.5 if gated and biased else 0.0, "alpha": 1.702}
        attrs |= {"activation": "silu" if gated else "relu2", "gated": int(gated), **clamped}
    kernel, batch = f"{op}.f8f8.{units}", plain_batch(rows)
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    (found,) = run_step(driver, kernel, inputs, attrs, batch, kv=layout_of(DType.BF16), pieces=1 + which % 2)
    return found, expected


def exact_inputs(weight: F8Rows, x: Array) -> tuple[F8Rows, Array]:
    """The same with whole codes: sums of a step are exact, in whatever order a GPU adds them up. Of each 128 columns,
    one input is the largest number of FP8, times the scale of its row."""
    numbers = to_float32(np.arange(256, dtype=np.uint8), DType.F8)
    small = np.flatnonzero((np.abs(numbers) <= 8) & (numbers == np.rint(numbers))).astype(np.uint8)
    whole, k = np.rint(4 * x).clip(-16, 16), weight.codes.shape[-1]
    whole.reshape(len(x), -1, k)[..., ::128] = 448
    factors = np.random.default_rng(k).uniform(0.5, 2, (len(x), 1)).astype(np.float32)
    return dataclasses.replace(weight, codes=small[weight.codes % len(small)]), whole * factors


def check(driver: ctypes.CDLL, units: str, op: str, group: int, rows: int, shape: tuple[int, int], which: int) -> None:
    """Against the reference. Matrix units keep about 14 bits of a step's sum, emulated ones all of float32."""
    close(driver, *product(driver, units, op, group, rows, shape, which), f"{rows} {shape} {which}")


def close(driver: ctypes.CDLL, found: Array, expected: Array, what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    bound = 5e-4 if isinstance(driver, RealDriver) else 6e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * scale, err_msg=what)


def test_values(gpu: ctypes.CDLL, units: str) -> None:
    """A clamped gate with biases, of which four neighbours are finished at once."""
    check(gpu, units, GATE_UP, 128, 20, (36, 304), 5)


def check_all(driver: ctypes.CDLL, units: str, op: str, group: int) -> None:
    """Tiles of each size, each shape; biases, gates and clamped gates in turn."""
    for which, shape in enumerate(SHAPES):
        for at, rows in enumerate(ROWS):
            check(driver, units, op, group, rows, shape, which + 2 * at)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_all_values(gpu: ctypes.CDLL, units: str, op: str, group: int) -> None:
    check_all(gpu, units, op, group)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_row_has_the_same_bits_in_every_batch(gpu: ctypes.CDLL, units: str, op: str, group: int) -> None:
    """Alone, and in tiles of each size."""
    alone, _ = product(gpu, units, op, group, 1, (20, 304), 1)
    for rows in ROWS:
        found, _ = product(gpu, units, op, group, rows, (20, 304), 1)
        assert found[:1].tobytes() == alone.tobytes(), f"{rows} rows"


@pytest.mark.slow
@pytest.mark.parametrize(("op", "group"), [(GATE_UP, 128), (DOWN, 0)])
def test_a_single_expert_and_many_without_rows(gpu: ctypes.CDLL, units: str, op: str, group: int) -> None:
    for rows, experts, slots in ((150, 1, 1), (9, 5, 5), (60, 40, 6)):
        found, expected = product(gpu, units, op, group, rows, (9, 150), 1, experts=experts, slots=slots)
        close(gpu, found, expected, f"{rows} {experts} {slots}")


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group", GROUPS)
def test_warps_compute_the_bits_of_warpgroups(
    gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, op: str, group: int
) -> None:
    """In tiles of each size, where the sums of a step are exact: the emulated instructions add these up in other
    orders."""
    for rows in ROWS:
        wide, warps = (
            product(gpu, take(monkeypatch, each), op, group, rows, (36, 304), 5, exact=True)[0] for each in UNITS
        )
        assert wide.tobytes() == warps.tobytes(), f"{rows} rows"


def test_each_slot_is_rounded_by_itself(gpu: ctypes.CDLL, units: str) -> None:
    """One slot holds an infinity: the others of its row keep their numbers. Products of what is not finite are NaN."""
    weight, ids = random_f8((2, 16, 100)), np.tile(np.arange(2, dtype=np.float32), (3, 1))
    x, shares = normal(5, 3, 200), np.array([[0, 1], [1, 1], [1, 0]], np.float32)
    x[0, 150] = np.inf
    attrs: dict[str, Attr] = {"activations": "fp8", "group": 0}
    kernel, batch = f"{DOWN}.f8f8.{units}", plain_batch(3)
    found = []
    for given in (x, np.nan_to_num(x, posinf=0)):
        inputs: list[Input] = [given, ids, shares, Quantised.of(weight), None, None]
        found.append(run_step(gpu, kernel, inputs, attrs, batch, kv=layout_of(DType.BF16))[0])
    assert np.isnan(found[0][0]).all()
    assert found[0][1:].tobytes() == found[1][1:].tobytes()


@pytest.mark.parametrize(("wide", "name"), NAMES)
def test_the_rows_choose_among_the_kernels(wide: bool, name: str) -> None:
    """Those of the tests run each of them."""
    tiles = expert_tiles(3, 2, DType.F8, wide=wide, fp8=True)
    chosen = [next(each for each in tiles if rows <= each.most_rows) for rows in ROWS]
    assert [(each.kernel, each.rows) for each in chosen] == [
        (f"experts_{name}_16", 8),
        (f"experts_{name}_64", 64),
        (f"experts_{name}_128", 128),
    ]
    cut = [(each.most_rows, each.rows) for each in sort_tiles(3, 2, exact=False)]
    assert [(each.most_rows, each.rows) for each in tiles] == cut, "as rows are sorted, whatever multiplies them"


def launches(rows: int, *, wide: bool) -> list[tuple[str, tuple[int, int, int]]]:
    """Those that run, and their grids."""
    of_codes, found, least = dataclasses.replace(own(2880, DType.F8), scales=0), list[Launch](), 1
    for tile in expert_tiles(EXPERTS, SLOTS, DType.F8, wide=wide, fp8=True):
        found.append(expert_launch(of_codes, TAKEN, tile, range(least, tile.most_rows + 1)))
        least = tile.most_rows + 1
    counts = dataclasses.replace(COUNTS, tokens=rows)
    return [(each.kernel, each.grid(counts, 1)) for each in found if min(each.grid(counts, 1)) > 0]


@pytest.mark.parametrize(("wide", "name"), NAMES)
def test_one_kernel_computes_each_number_of_rows(wide: bool, name: str) -> None:
    """The grid depends on the number of rows alone; K is not cut."""
    assert launches(1, wide=wide) == [(f"experts_{name}_16", (4, 45, 1))]
    assert launches(32, wide=wide) == [(f"experts_{name}_16", (48, 45, 1))]
    assert launches(33, wide=wide) == [(f"experts_{name}_64", (132 // 64 + EXPERTS, 45, 1))]
    assert launches(2048, wide=wide) == [(f"experts_{name}_128", (64 + EXPERTS, 45, 1))]


def test_launches_of_the_rounding() -> None:
    """A block for each slot of a row, and each strip of its columns."""
    of_slots = round_launch(0, 0, 0, k=2000, filled=2048, group=128, rows=TAKEN.rows, slots=SLOTS)
    assert of_slots.grid(dataclasses.replace(COUNTS, tokens=3), 1) == (12, 2, 1)


@pytest.mark.parametrize(("wide", "name"), NAMES)
def test_blocks_are_those_of_the_other_products(wide: bool, name: str) -> None:
    """Their threads and their shared memory."""
    kernels = expert_kernels(DType.F8, wide=wide, fp8=True)
    assert [each.rows for each in kernels] == [8, 64, 128]
    for kernel in kernels:
        launch = expert_launch(dataclasses.replace(own(2880, DType.F8), scales=0), TAKEN, kernel, range(1, 2))
        threads = 384 if wide else 128 if kernel.rows == 8 else 256
        assert (launch.threads, launch.shared) == (threads, fp8_shared_bytes(f"product_{name}_{max(16, kernel.rows)}"))
        assert launch.arguments[-1].value is None, "where the scales lie: behind the arguments of all experts"
        assert len(launch.arguments) == 16


def test_experts_that_have_to_round_by_themselves_are_refused(
    gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass has made kernel calls of it, or a session does not open."""
    monkeypatch.setattr(RoundToFp8, "__call__", lambda self, program: (program, PassReport(name="none", fired=0)))
    with pytest.raises(EngineError, match=r"(?s)has a type that cuda targets do not store.*expected: f8.*got: f32"):
        product(gpu, UNITS[0], GATE_UP, 0, 1, (33, 8), 0)


FAULTS = {  # what → (file, the right text, the wrong one)
    "rows in the order of the step": (
        "wide_fp8.cuh",
        "p.source(min(top + thread / 8 + 16 * i, p.rows - 1)) * line",
        "min(top + thread / 8 + 16 * i, p.rows - 1) * line",
    ),
    "scales in the order of the step": (
        "wide_fp8.cuh",
        "static_cast<int64_t>(p.source(row)) * each",
        "static_cast<int64_t>(row) * each",
    ),
    "scales of the first group": (
        "wide_fp8.cuh",
        "of_row + (p.pairs && !p.of.group ? 0 : step), there",
        "of_row, there",
    ),
    "the weight of the first expert": ("products.cu", "tile.expert * bytes", "0 * bytes"),
    "the bias of the first expert": ("products.cu", "static_cast<int64_t>(tile.expert) * n", "0 * n"),
    "the gate is not clamped": ("epilogue.cuh", "const bool clamps = gated && limit > 0.f;", "const bool clamps = 0;"),
    "results in the order of the list": (
        "tile_sums.cuh",
        "p.to.write_four(p.target(row), col, of, gated);",
        "p.to.write_four(row, col, of, gated);",
    ),
}
ROW_FAULTS = {  # without groups, of a K with more steps than shared memory holds
    "the scale of the row behind": ("wide_fp8.cuh", "p.pairs ? of_list[row]", "p.pairs ? of_list[row + 1]"),
    "scales of another step": (
        "wide_fp8.cuh",
        "of_row + (p.pairs && !p.of.group ? 0 : step), there",
        "of_row + step, there",
    ),
}
OF_WARPS = {  # as FAULTS
    "rows of a warp's tile in the order of the step": (
        "warp_fp8.cuh",
        "p.source(min(top + thread / 8 + kLines * i, p.rows - 1))",
        "min(top + thread / 8 + kLines * i, p.rows - 1)",
    ),
    "scales of a warp's tile in the order of the step": (
        "warp_fp8.cuh",
        "found.there ? p.source(top + thread) : 0;",
        "found.there ? top + thread : 0;",
    ),
    "scales of a warp's first group": ("warp_fp8.cuh", "next_scale = one ? 0 : 1;", "next_scale = 0;"),
}
ROW_FAULTS_OF_WARPS = {  # as ROW_FAULTS
    "for a warp, the scale of the row behind": ("warp_fp8.cuh", "p.pairs ? of_list[own]", "p.pairs ? of_list[own + 1]"),
    "for a warp, scales of another step": ("warp_fp8.cuh", "next_scale = one ? 0 : 1;", "next_scale = 1;"),
    "for a warp, scales of as many rows as there are steps": ("warp_fp8.cuh", "row * (one ? 1 : steps)", "row * steps"),
}
OF_ROWS = {**ROW_FAULTS, **ROW_FAULTS_OF_WARPS}
EVERY_FAULT = {**FAULTS, **OF_WARPS, **OF_ROWS}
LONG = "scales of a warp's tile in the order of the step", "for a warp, the scale of the row behind"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in EVERY_FAULT]
)
def test_faults_are_seen(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    """By an error, or by wrong values."""
    gpu.emulated_set_devices(1)  # a real GPU would not say what is wrong
    file, right, wrong = EVERY_FAULT[fault]
    plant(monkeypatch, tmp_path, file, right, wrong)
    units = take(monkeypatch, UNITS[file == "warp_fp8.cuh"])
    with pytest.raises((TargetError, AssertionError)):
        check(gpu, units, GATE_UP, *((0, 20, (36, 1160)) if fault in OF_ROWS else (128, 20, (36, 304))), 5)
