"""Quantised weights times rows of bf16: the sums that docs/design.md describes, bit for bit, on every level that has
them."""

import itertools

import numpy as np
import pytest

from ingot import _cpu
from ingot.dtypes import DType, round_to_bf16, to_float32
from ingot.plan import Attr
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.weight_formats import FORMATS
from tests.plugins.cpu.one_step import Quantised, activations_of, native_outputs, open_step, plain_batch
from tests.plugins.ops.calls import random_grouped, random_weight

pytestmark = pytest.mark.native

NATIVE, EMULATED = "avx512bf16", "avx512bf16emu"
LEVELS = (NATIVE, EMULATED)
CASES = [
    (dtype, group)
    for dtype, described in FORMATS.items()
    for group in (*described.groups, *((0,) if described.rows_alone or not described.groups else ()))
]
ROWS = 40


def _run(dtype: str, level: str, x: Array, weight: WeightRows, rows: int, threads: int = 1) -> Array:
    kernel = f"matmul.{dtype}.{level}"
    attrs: dict[str, Attr] = {
        "activation": "none",
        "gated": 0,
        "activations": activations_of(kernel),
        "group": weight.group,
    }
    session = open_step(
        kernel, [x, Quantised.of(weight), None, None], attrs, plain_batch(len(x)), threads=threads, pieces=threads
    )
    session.native.write_buffer("in0", x[:rows])
    (y,) = native_outputs(session, plain_batch(rows))
    session.close()
    return y


def _x(k: int) -> Array:
    return np.random.default_rng(k).standard_normal((ROWS, k)).astype(np.float32)


def _weight(dtype: str, n: int, k: int, group: int, shift: str = "") -> WeightRows:
    """shift: "offset", or values with further bits."""
    if not shift:
        return random_weight(dtype, n, k, group)
    more = shift == "more bits"
    return random_grouped((n, k), group, "" if more else shift, more_bits=more, byte_codes=dtype[1] == "8")


def _parts(weight: WeightRows) -> tuple[list[tuple[Array, float]], Array, Array | None]:
    """(numbers [N, K] and what one is worth; scales and shifts of groups [N, groups])"""
    n, k = weight.shape
    ones = np.ones((n, -(-k // (weight.group or 128))), np.float32)
    if isinstance(weight, QuantisedRows):
        scales = ones if weight.multipliers is None else weight.multipliers.astype(np.float32)
        return [(weight.codes.astype(np.float32), 1.0)], scales, None
    if isinstance(weight, F8Rows):
        scales = ones if weight.group_scale is None else weight.group_scale
        return [(to_float32(weight.codes, DType.F8), 1.0)], scales, None
    if isinstance(weight, UnitRows):
        return [(weight.codes.astype(np.float32), 1.0)], weight.group_scale, weight.offset
    assert isinstance(weight, GroupedRows)
    tables = [(weight.table, 1.0), (weight.more_bits, 1 / 256)]
    numbers = [
        (np.take_along_axis(table, weight.codes, 1).astype(np.float32), unit)
        for table, unit in tables
        if table is not None
    ]
    shift = weight.shift
    if shift is not None and not weight.is_offset[0]:
        shift = -(shift * weight.group_scale)
    return numbers or [(weight.codes.astype(np.float32), 1.0)], weight.group_scale, shift


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Products of two float32 are exact in float64; sums of these and a float32 round once more, which no test here
    meets at a tie."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def _written_out(x: Array, weight: WeightRows) -> Array:
    """One output after another."""
    (n, k), inputs = weight.shape, round_to_bf16(x)
    numbers, scales, shifts = _parts(weight)
    group = weight.group or 128
    y = np.zeros((len(x), n), np.float32)
    for r, c in np.ndindex(len(x), n):
        total = np.float32(0)
        for begin, (table, unit), parity in itertools.product(range(0, k, group), numbers, range(2)):
            end = min(begin + group, k)
            sum_ = np.float32(0)
            for at in range(begin + 2 * parity, end, 4):
                for i in range(min(at + 1, end - 1), at - 1, -1):  # the odd column, then the even one
                    sum_ = _fma(inputs[r, i], table[c, i], sum_)
            total = _fma(sum_, scales[c, begin // group] * np.float32(unit), total)
        if shifts is not None:
            for g, shift in enumerate(shifts[c]):
                total = _fma(shift, _sum_of_group(inputs[r, g * group : (g + 1) * group]), total)
        y[r, c] = total * weight.scale[c]
    return y


def _sum_of_group(x: Array) -> np.float32:
    """Sums of pairs 0, 16, ..., of pairs 1, 17, ... and so on; then lanes 0 to 7 and 8 to 15 of these, and so on."""
    pairs = np.zeros((-(-len(x) // 32) * 16, 2), np.float32)
    pairs.reshape(-1)[: len(x)] = x
    lanes = np.zeros(16, np.float32)
    for vector in pairs.reshape(-1, 16, 2):
        lanes = (lanes + vector[:, 1]) + vector[:, 0]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return np.float32(lanes[0])


SHIFTS = [("w4ts", 32, "offset"), ("w8ts", 64, "offset"), ("w4t", 16, "more bits"), ("w4t", 128, "more bits")]
EACH = [(*case, "") for case in CASES] + SHIFTS


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "group", "shift"), EACH)
def test_the_sums_are_those_of_the_design(level: str, dtype: str, group: int, shift: str) -> None:
    """Even and odd pairs of up to 128 columns, or of a group, each fed by two fused additions for each pair."""
    for k in (1, 7, 150, 301):
        x, weight = _x(k)[:3], _weight(dtype, 4, k, group, shift)
        assert _run(dtype, level, x, weight, 3).tobytes() == _written_out(x, weight).tobytes(), f"{k} columns"


@pytest.mark.parametrize(("dtype", "group", "shift"), EACH)
@pytest.mark.parametrize(("n", "k"), [(40, 33), (100, 1102), (24, 2048)])
def test_levels_agree_bit_for_bit_for_any_number_of_rows(dtype: str, group: int, shift: str, n: int, k: int) -> None:
    """Rows that read the codes once, that pass over them several times, and that leave them widened, by blocks."""
    x, weight = _x(k), _weight(dtype, n, k, group, shift)
    whole = _run(dtype, EMULATED, x, weight, ROWS)
    for rows, threads in (
        (1, 1),
        (2, 2),
        (4, 1),
        (5, 2),
        (9, 1),
        (12, 2),
        (13, 1),
        (25, 2),
        (36, 1),
        (37, 2),
        (ROWS, 1),
    ):
        assert _run(dtype, NATIVE, x, weight, rows, threads).tobytes() == whole[:rows].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("dtype", ["w8", "w5ks", "w6k", "f8"])
def test_tables_of_bytes_change_no_bit(dtype: str) -> None:
    if not (preferred := _cpu.set_permutes_bytes(False)):
        pytest.skip("this machine lacks AVX512_VBMI")
    try:
        x, made = _x(600), []
        weight = _weight(dtype, 40, 600, dict(CASES)[dtype])
        for tables in (False, True):
            _cpu.set_permutes_bytes(tables)
            made.append([_run(dtype, NATIVE, x, weight, rows).tobytes() for rows in (1, 3, 8, 9, ROWS)])
    finally:
        _cpu.set_permutes_bytes(preferred)
    assert made[0] == made[1]


ROUNDING = [
    name
    for name in kernel_table()
    if name.startswith("matmul.") and name.split(".")[1] in FORMATS and activations_of(name).startswith("bf16")
]


@pytest.mark.parametrize("kernel", ROUNDING)
def test_x_is_rounded_to_bf16(kernel: str) -> None:
    _, dtype, level = kernel.split(".")
    x, weight = _x(64), _weight(dtype, 16, 64, dict(CASES)[dtype])
    rounded = _run(dtype, level, round_to_bf16(x), weight, ROWS)
    assert _run(dtype, level, x, weight, ROWS).tobytes() == rounded.tobytes()
