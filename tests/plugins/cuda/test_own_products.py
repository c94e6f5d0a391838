"""ingot's own matrix products, as on a machine without cuBLASLt: values at odd shapes, and the same bits for a row
whatever stands beside it."""

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.dtypes import DType, round_to_bf16
from ingot.plan import Attr
from ingot.plugins import layouts
from ingot.plugins.cuda import own_products
from ingot.plugins.cuda.bind import ACTIVATIONS
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.weight_rows import WeightRows
from ingot.plugins.weight_values import product as specified_product
from ingot.weight_formats import FORMATS, KEPT
from tests.plugins.cpu.one_step import Input, Packed, Quantised, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.plugins.ops.calls import random_f8, random_grouped, random_units, rows_of

ROWS = (1, 7, 9, 17, 65)  # each kernel computes some
KEPT_TYPES = tuple(dict.fromkeys(each.partition("g")[0] for each in KEPT))
SHAPES = ((33, 8, 0), (70, 300, 0), (66, 172, 1), (300, 520, 0), (2, 1000, 1))  # n, k, gated


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codes(precision: str, n: int, k: int, index: int = 0) -> WeightRows:
    """Of w8, or of w4 with the group of its name: every code and multiplier that there is. Of kept codes, whose groups,
    shifts and bits go round with the index."""
    dtype, _, group = precision.partition("g")
    if dtype in KEPT_TYPES:
        return rows_of(dtype, n, k, index)
    random = np.random.default_rng(n + k)
    scale = random.random(n).astype(np.float32) / np.float32(50)
    if not group:
        return QuantisedRows(scale=scale, codes=random.integers(-127, 128, (n, k)).astype(np.int8))
    multipliers = random.integers(1, 16, (n, -(-k // int(group)))) * random.choice([-1, 1], (n, -(-k // int(group))))
    return QuantisedRows(
        scale=scale / np.float32(4),
        codes=random.integers(-8, 8, (n, k)).astype(np.int8),
        multipliers=multipliers.astype(np.int8),
        group=int(group),
    )


def product(
    driver: ctypes.CDLL, precision: str, rows: int, shape: tuple[int, int, int], which: int, needs: str = "sm80"
) -> tuple[Array, Array]:
    """What the kernels and the reference make of the first rows of one input. which: activation and epilogue; needs: at
    the end of the kernel's name."""
    n, k, gated = shape
    out, extra, dtype = n // 2 if gated else n, which % 4, precision.partition("g")[0]
    weight: Packed = (
        Quantised.of(codes(precision, n, k, which // 3), gated=bool(gated))
        if dtype in FORMATS
        else Packed(values=normal(k, n, k) / np.float32(k**0.5), dtype=DType(dtype))
    )
    attrs: dict[str, Attr] = {
        "activation": (*ACTIVATIONS,)[which % len(ACTIVATIONS)],
        "gated": gated,
        "activations": "bf16" if dtype in FORMATS else dtype,
        "group": weight.group,
    }
    bias: Input = Packed(values=normal(2, n)) if extra in (1, 3) else None
    residual = normal(3, 400, out)[:rows] if extra in (2, 3) else None
    inputs: list[Input] = [normal(1, 400, k)[:rows], weight, bias, residual]
    kernel, batch, kv = f"matmul.{dtype}.{needs}", plain_batch(rows), DType(str(attrs["activations"]))
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    (found,) = run_step(driver, kernel, inputs, attrs, batch, kv=layout_of(kv), pieces=1 + which % 2)
    return found, expected


def check(driver: ctypes.CDLL, precision: str, every: int = 1) -> None:
    """Every kernel with every shape; every: only each so many of the cases."""
    cases = [(rows, shape) for rows in ROWS for shape in SHAPES]
    for which, (rows, shape) in [*enumerate(cases)][::every]:
        found, expected = product(driver, precision, rows, shape, which)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=6e-6 * scale, err_msg=f"{rows} {shape}")


def check_bits(driver: ctypes.CDLL, precision: str, shape: tuple[int, int, int], which: int) -> None:
    """A row alone, in few and in many."""
    alone, _ = product(driver, precision, 1, shape, which)
    for rows in (5, 16, 40, 130):
        found, _ = product(driver, precision, rows, shape, which)
        assert found[:1].tobytes() == alone.tobytes(), f"{rows} rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("f16", marks=pytest.mark.slow), "f32", "w8", "w4g32", "w4g128", *KEPT_TYPES]
)
def test_values(gpu: ctypes.CDLL, precision: str) -> None:
    check(gpu, precision, 3)


BITS = [
    (shape, which, precision)
    for shape, which in (((70, 300, 0), 3), ((66, 172, 1), 7), ((40, 1104, 0), 2))
    for precision in ("bf16", "f32", "w8", "w4g64", *KEPT_TYPES)
]


@pytest.mark.parametrize(
    ("shape", "which", "precision"), [BITS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in BITS[1:])]
)
def test_a_row_has_the_same_bits_in_any_batch(
    gpu: ctypes.CDLL, precision: str, shape: tuple[int, int, int], which: int
) -> None:
    check_bits(gpu, precision, shape, which)


def kept(precision: str, n: int, k: int) -> Iterator[WeightRows]:
    """Rows whose scale is 1, in groups of each size: with zero points, offsets, and more bits than eight."""
    for group in FORMATS[precision].groups[::-1]:
        if precision == "f8":
            found = [random_f8((n, k), group), *([random_f8((n, k))] if group == 16 else ())]
        elif FORMATS[precision].unit_bytes:
            found = [*units(precision, n, k, group)]
        elif precision.endswith("ts"):
            byte_codes = precision.startswith("w8")
            found = [random_grouped((n, k), group, shift, byte_codes=byte_codes) for shift in ("zero", "offset")]
        else:
            bits, byte_codes = FORMATS[precision].bits, precision.startswith("w8")
            more_bits = bits == 4 and group in (32, 128)
            found = [random_grouped((n, k), group, more_bits=more_bits, byte_codes=byte_codes, bits=bits)]
        for each in [*found, *short_ways(precision, n, k, group)]:
            yield dataclasses.replace(each, scale=np.ones(n, np.float32))


def units(precision: str, n: int, k: int, group: int) -> Iterator[WeightRows]:
    """Every code beside the largest and the smallest numbers of units; and units of few bits, and of none."""
    rows = random_units(precision, (n, k), group)
    yield rows
    least = 0 if precision in ("w2ks", "w4ks") else -128
    count = np.where(np.arange(rows.count.size).reshape(rows.count.shape) % 2, 127, least).astype(np.int8)
    unit = np.full(rows.unit.shape, 1.9990234375, np.float32)
    unit.reshape(-1)[::3] = 0
    unit[::4] = 2.0**-24
    offset_count = None if rows.offset_count is None else -1 - count
    yield dataclasses.replace(
        rows,
        count=count,
        unit=unit,
        offset_count=offset_count,
        offset_unit=None if rows.offset_unit is None else unit[::-1].copy(),
    )


def short_ways(precision: str, n: int, k: int, group: int) -> Iterator[WeightRows]:
    """Codes of four bits for which kernels have a shorter way (kept_rows.cuh), and some that just have none."""
    random, few_bits = np.random.default_rng(group), ~np.uint16(0x1F)
    second = np.arange(n) // 16 == 1  # of the panels, which may have tables of their own
    if precision == "w4ts":
        with_zeros = random_grouped((n, k), group, "zero")
        assert with_zeros.shift is not None
        assert with_zeros.table is not None
        for zero in (0.5, -1.0, 16.0, 17.0, -16.0, -17.0):
            shift = with_zeros.shift.copy()
            shift[5, 0] = zero
            yield dataclasses.replace(with_zeros, shift=shift, table=with_zeros.table - np.int8(3))
        yield dataclasses.replace(with_zeros, is_offset=second)
        for first in (0, -8):
            shift = random.integers(-16, 17, with_zeros.shift.shape).astype(np.float32)
            in_order = np.broadcast_to(np.arange(16) + first, (n, 16)).astype(np.int8)
            yield dataclasses.replace(with_zeros, shift=shift, table=in_order)
        with_offsets = random_grouped((n, k), group, "offset")
        for first in (0, -8, 1):  # the last one is no table that the way takes
            in_order = np.broadcast_to(np.arange(16) + first, (n, 16)).astype(np.int8)
            yield dataclasses.replace(with_offsets, table=in_order)
            yield dataclasses.replace(with_offsets, table=in_order, is_offset=second)
    if precision == "w4t":
        rows = random_grouped((n, k), group)
        assert rows.table is not None
        scales = (rows.group_scale.astype(np.float16).view(np.uint16) & few_bits).view(np.float16).astype(np.float32)
        more_bits = scales.copy()
        more_bits[3, -1], more_bits[4, -1] = 1.03125, 1.015625  # six bits, seven
        for first in (-8, 0, 1, -9):
            in_order = np.broadcast_to(np.arange(16) + first, (n, 16)).astype(np.int8)
            yield dataclasses.replace(rows, table=in_order)
            yield dataclasses.replace(rows, table=np.where(second[:, None], in_order, rows.table))
        for lowest, highest in ((-64, 63), (-65, 63), (-64, 64)):
            table = random.integers(lowest, highest + 1, 16).astype(np.int8)
            table[3], table[12] = lowest, highest
            other = np.where(second[:, None], table, random.integers(lowest, highest + 1, 16).astype(np.int8))
            for scale in (scales, more_bits):
                yield dataclasses.replace(rows, table=np.broadcast_to(table, (n, 16)).copy(), group_scale=scale)
                yield dataclasses.replace(rows, table=other, group_scale=scale)


def check_numbers(driver: ctypes.CDLL, precision: str, rows: int, needs: str = "sm80") -> None:
    """Each row of x takes one column of the weight, so that a sum has one number. needs: at the end of the kernel's
    name; kernels of warpgroups copy whole pieces of 16 bytes. Where columns share units, all of a weight do not."""
    more, apart = (248, 53) if FORMATS[precision].unit_bytes else (0, 1)
    n, k = 37, (150 if needs == "sm80" else 152) + more
    for index, weight in enumerate(kept(precision, n, k)):
        x = np.zeros((rows, k), np.float32)
        columns = (apart * np.arange(rows) + 29 * index) % k
        x[np.arange(rows), columns] = 1
        attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "bf16", "group": weight.group}
        inputs: list[Input] = [x, Quantised.of(weight), None, None]
        (found,) = run_step(
            driver, f"matmul.{precision}.{needs}", inputs, attrs, plain_batch(rows), kv=layout_of(DType.BF16)
        )
        np.testing.assert_array_equal(found, round_to_bf16(weight.values)[:, columns].T, f"group {weight.group}")
        np.testing.assert_array_equal(found, specified_product(x, weight, "bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", KEPT_TYPES)
@pytest.mark.parametrize("rows", [8, 150])
def test_kept_codes_are_the_numbers_of_the_specification(gpu: ctypes.CDLL, precision: str, rows: int) -> None:
    """To the bit."""
    check_numbers(gpu, precision, rows)


@pytest.mark.slow
@pytest.mark.parametrize("precision", KEPT_TYPES)
def test_numbers_of_whole_pairs(gpu: ctypes.CDLL, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that computes two panels, which may have different ways to their numbers."""
    monkeypatch.setattr(own_products, "HALF_PAIRS", 0)
    check_numbers(gpu, precision, 3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4t", "w4ts"])
def test_panels_that_say_nothing_of_their_groups(
    gpu: ctypes.CDLL, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions: the same numbers, by the way that takes all."""
    monkeypatch.setattr(layouts, "short_ways", lambda scales, shifts, is_offset: np.zeros(len(scales), np.uint8))
    check_numbers(gpu, precision, 3)


@pytest.mark.slow
def test_numbers_of_one_format(gpu: ctypes.CDLL) -> None:
    check_numbers(gpu, "w4ts", 8)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [1, 16, 63, 300])
def test_tables_of_codes(gpu: ctypes.CDLL, hidden: int) -> None:
    """Token and position rows of w8."""
    table, positions = (Quantised.of(codes("w8", 65 + i, hidden), panels=False) for i in (0, 1))
    for inputs in ([table, None], [table, positions]):
        batch, attrs = plain_batch(9), {"scale": 1.5}
        (expected,) = reference_outputs("embedding.w8.sm80", [*inputs], attrs, batch)
        (found,) = run_step(gpu, "embedding.w8.sm80", [*inputs], attrs, batch, kv=layout_of(DType.BF16))
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "w8", "w4g32"])
def test_whole_pairs_and_halves_give_the_same_bits(
    gpu: ctypes.CDLL, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that computes few rows takes 16 rows of a small weight, 32 of a large one."""
    for rows in (3, 11):
        halves, expected = product(gpu, precision, rows, (70, 300, 0), 3)
        with monkeypatch.context() as changed:
            changed.setattr(own_products, "HALF_PAIRS", 0)
            pairs, _ = product(gpu, precision, rows, (70, 300, 0), 3)
        assert halves.tobytes() == pairs.tobytes(), f"{rows} rows"
        np.testing.assert_allclose(pairs, expected, rtol=0, atol=6e-6 * max(1.0, float(np.abs(expected).max())))
