"""Packed layouts of quantised weights: what is packed comes back, and every byte lies where the drawing says."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from ingot.dtypes import DType
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.layouts import (
    deinterleave_quantised,
    group_of,
    interleave_quantised,
    pack_quantised,
    pack_table,
    panel_bytes,
    panel_layout,
    row_bytes,
    unpack_f8,
    unpack_grouped,
    unpack_quantised,
    unpack_table,
    unpack_units,
)
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.unit_rows import UnitRows
from ingot.weight_formats import FORMATS
from tests.plugins.ops.calls import random_f8, random_grouped, random_rows, random_units

Kept = TypeVar("Kept", GroupedRows, UnitRows)
SHAPES = [(1, 1), (15, 172), (16, 64), (17, 128), (40, 300), (48, 129)]


def assert_equal(got: QuantisedRows, expected: QuantisedRows) -> None:
    np.testing.assert_array_equal(got.scale, expected.scale)
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.integers, expected.integers)
    assert got.group == expected.group


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_panels_come_back(n: int, k: int, group: int) -> None:
    rows, dtype = random_rows(n, k, group), DType.W4 if group else DType.W8
    packed = pack_quantised(rows)
    assert packed.shape == (-(-n // 16), panel_bytes(k, dtype, group))
    assert panel_bytes(k, dtype, group) % 64 == 0
    assert_equal(unpack_quantised(packed.reshape(-1), n, k, group), rows)


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("half", [1, 15, 16, 33])
def test_gated_rows_come_back(half: int, group: int) -> None:
    rows = random_rows(2 * half, 70, group)
    mixed = interleave_quantised(rows)
    assert mixed.shape[0] % 32 == 0
    assert_equal(deinterleave_quantised(mixed, half), rows)
    padding = np.ones(len(mixed.scale), np.bool_)
    padding[np.isin(mixed.scale, rows.scale)] = False
    assert padding.sum() == len(mixed.scale) - 2 * half
    assert not mixed.integers[padding].any()
    assert mixed.multipliers is None or (mixed.multipliers != 0).all()


def assert_come_back(rows: Kept, unpack: Callable[[npt.NDArray[np.uint8], int, int, DType, int], Kept]) -> None:
    """40 rows, plain and gated."""
    dtype, columns = DType(rows.format.dtype), rows.shape[1]
    for gated in (False, True):
        packed = pack_quantised(rows, gated=gated)
        assert packed.shape[1] == panel_bytes(columns, dtype, rows.group)
        found = unpack(packed.reshape(-1), 64 if gated else 40, columns, dtype, rows.group)
        found = deinterleave_quantised(found, 20) if gated else found
        np.testing.assert_array_equal(found.codes, rows.codes)
        np.testing.assert_array_equal(found.values, rows.values)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("shift", ["", "zero", "offset"])
@pytest.mark.parametrize("byte_codes", [False, True])
def test_groups_come_back(group: int, shift: str, byte_codes: bool) -> None:
    rows = random_grouped((40, 150), group, shift, more_bits=group == 64, byte_codes=byte_codes)
    dtype = DType(rows.format.dtype)
    assert str(dtype.value) == ("w8" if byte_codes else "w4") + ("ts" if shift else "t")
    assert_come_back(rows, unpack_grouped)


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (2, 128), (3, 32), (3, 64)])
def test_groups_of_few_bits_come_back(bits: int, group: int) -> None:
    rows = random_grouped((40, 150), group, bits=bits)
    dtype = DType(f"w{bits}t")
    assert rows.format is dtype.weight_format
    assert_come_back(rows, unpack_grouped)


@pytest.mark.parametrize(
    ("dtype", "group"),
    [(DType(each.dtype), group) for each in FORMATS.values() if each.unit_bytes for group in each.groups],
)
def test_units_come_back(dtype: DType, group: int) -> None:
    rows = random_units(dtype.value, (40, 300), group)
    assert rows.format is dtype.weight_format
    assert_come_back(rows, unpack_units)


def test_every_byte_of_a_w4ks_panel() -> None:
    rows = random_units("w4ks", (17, 300), 32)
    assert rows.offset_count is not None
    assert rows.offset_unit is not None
    second = pack_quantised(rows)[1]
    assert second[:64].view(np.float32).tolist() == [rows.scale[16], *[0] * 15]
    assert not second[64:128].any()
    for block, groups in ((0, 8), (1, 2)):
        numbers = second[128 + block * 320 :][:320]
        assert numbers[:64].view(np.float16).reshape(2, 16)[:, 0].tolist() == [
            rows.unit[16, block],
            rows.offset_unit[16, block],
        ]
        of_groups = slice(block * 8, block * 8 + groups)
        counts, pairs = numbers[64:192].view(np.int8).reshape(8, 16), numbers[192:].view(np.int8).reshape(4, 16, 2)
        assert counts[:groups, 0].tolist() == rows.count[16, of_groups].tolist()
        assert pairs[:, 0].reshape(-1)[:groups].tolist() == rows.offset_count[16, of_groups].tolist()
    line = second[128 + 640 + 64 : 128 + 640 + 68]  # k = 8 to 15
    assert line.tolist() == (rows.codes[16, 8:12] | rows.codes[16, 12:16] << 4).view(np.uint8).tolist()
    assert len(second) == 128 + 640 + 512 * 8


def test_every_byte_of_a_w6k_panel() -> None:
    rows = random_units("w6k", (17, 300), 16)
    second = pack_quantised(rows)[1]
    numbers = second[128 + 288 :][:288]  # of the second 256 columns
    assert numbers[:2].view(np.float16)[0] == rows.unit[16, 1]
    assert numbers[32:].view(np.int8).reshape(16, 16)[:3, 0].tolist() == rows.count[16, 16:19].tolist()
    begin = 128 + 2 * 288
    low, next_low, upper = (second[begin + 192 + 64 * line :][:4] for line in range(3))  # k = 16 to 31
    code = (rows.codes[16, 16:32] + 32).astype(np.uint8).reshape(4, 4)
    assert low.tolist() == ((code[0] & 15) | (code[1] & 15) << 4).tolist()
    assert next_low.tolist() == ((code[2] & 15) | (code[3] & 15) << 4).tolist()
    assert upper.tolist() == (code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6).tolist()
    assert len(second) == begin + 512 * 12


def test_every_byte_of_a_w8t_panel() -> None:
    rows = random_grouped((17, 150), 64, "offset", byte_codes=True)
    second = pack_quantised(rows)[1]
    assert second[64:80].tolist() == [0] * 16
    assert second[80:82].tolist() == [1, 0]
    lines = second[128 + 4 * 2 * 32 :].view(np.int8).reshape(256 // 4, 16, 4)
    assert lines[:, 0].reshape(-1)[:150].tolist() == rows.codes[16].tolist()
    assert not lines[:, 1:].any()
    assert len(second) == panel_bytes(150, DType.W8TS, 64)


def test_every_byte_of_a_w4t_panel() -> None:
    rows = random_grouped((17, 150), 64, "zero", more_bits=True)
    assert rows.table is not None
    second = pack_quantised(rows)[1]
    assert second[:64].view(np.float32)[0] == rows.scale[16]
    assert second[64:80].view(np.int8).tolist() == rows.table[16].tolist()
    assert rows.shift is not None
    assert rows.more_bits is not None
    assert second[80:82].tolist() == [0, 1]
    assert second[96:112].view(np.int8).tolist() == rows.more_bits[16].tolist()
    numbers = second[128 : 128 + 4 * 2 * 32].view(np.float16).reshape(4, 2, 16)
    assert numbers[:3, 0, 0].tolist() == rows.group_scale[16].tolist()
    assert numbers[:3, 1, 0].tolist() == rows.shift[16].tolist()
    line = second[128 + 256 + 64 : 128 + 256 + 68]  # k = 8 to 15
    assert line.tolist() == (rows.codes[16, 8:12] | rows.codes[16, 12:16] << 4).tolist()


@pytest.mark.parametrize("group", [0, 16, 128])
def test_f8_comes_back(group: int) -> None:
    rows = random_f8((40, 150), group)
    for gated in (False, True):
        packed = pack_quantised(rows, gated=gated)
        assert packed.shape[1] == panel_bytes(150, DType.F8, group)
        assert group_of(panel_layout(DType.F8, group)) == group
        found = unpack_f8(packed.reshape(-1), 64 if gated else 40, 150, group)
        found = deinterleave_quantised(found, 20) if gated else found
        np.testing.assert_array_equal(found.codes, rows.codes)
        np.testing.assert_array_equal(found.values, rows.values)


def test_every_byte_of_an_f8_panel() -> None:
    rows = random_f8((17, 70), 64)
    second = pack_quantised(rows)[1]
    assert rows.group_scale is not None
    assert second[:64].view(np.float32)[0] == rows.scale[16]
    assert second[128 : 128 + 2 * 64].view(np.float32).reshape(2, 16)[:, 0].tolist() == rows.group_scale[16].tolist()
    assert second[128 + 2 * 64 :].reshape(128, 16)[:, 0].tolist() == [*rows.codes[16].tolist(), *[0] * 58]


def test_every_byte_of_a_w8_panel() -> None:
    rows = random_rows(17, 70)
    second = pack_quantised(rows)[1]
    assert second[:64].view(np.float32).tolist() == [float(rows.scale[16]), *[0.0] * 15]
    assert second[64:128].view(np.int32).tolist() == [int(rows.codes[16].sum(dtype=np.int64)), *[0] * 15]
    first = pack_quantised(rows)[0][128:].view(np.int8)
    for n, k in np.ndindex(16, 128):
        tile, row, column = k // 64, k % 64 // 4, k % 4
        assert first[tile * 1024 + row * 64 + n * 4 + column] == (rows.codes[n, k] if k < 70 else 0)


@pytest.mark.parametrize("group", [32, 128])
def test_every_byte_of_a_w4_panel(group: int) -> None:
    rows = random_rows(16, 150, group)
    assert rows.multipliers is not None
    panel, groups = pack_quantised(rows)[0], 256 // group
    multipliers = panel[128 : 128 + 16 * groups].view(np.int8).reshape(groups, 16)
    real = rows.multipliers.shape[1]
    np.testing.assert_array_equal(multipliers[:real], rows.multipliers.T)
    assert (multipliers[real:] == 1).all()
    blocks = panel[-2 * 1024 :]
    for n, k in np.ndindex(16, 256):
        byte = int(blocks[k // 128 * 1024 + k % 64 // 4 * 64 + n * 4 + k % 4])
        nibble = byte >> 4 if k % 128 >= 64 else byte & 15
        assert nibble - 8 == (rows.codes[n, k] if k < 150 else 0)


@pytest.mark.parametrize("k", [1, 64, 70])
def test_tables_come_back(k: int) -> None:
    rows = random_rows(5, k)
    table = pack_table(rows)
    assert table.shape == (5, row_bytes(k, DType.W8))
    assert_equal(unpack_table(table.reshape(-1), k), rows)
    assert table[3, :4].view(np.float32)[0] == rows.scale[3]


def test_names() -> None:
    assert panel_layout(DType.W8) == "panel16.w8"
    assert panel_layout(DType.W4, 64) == "panel16.w4g64"
    assert [group_of(name) for name in ("row", "panel16.w4g128.gated", "panel16.bf16")] == [0, 128, 0]


@pytest.mark.parametrize(
    ("dtype", "group", "bits"), [(DType.W8, 0, 8), (DType.W4, 128, 4.0625), (DType.W4, 64, 4.125), (DType.W4, 32, 4.25)]
)
def test_panels_are_as_large_as_their_bits(dtype: DType, group: int, bits: float) -> None:
    """Beside scale and sum, 8 bytes a column."""
    assert panel_bytes(2048, dtype, group) * 8 / (16 * 2048) == bits + 64 / 2048


def test_the_codes_of_a_w5ks_panel() -> None:
    rows = random_units("w5ks", (17, 300), 32)
    second = pack_quantised(rows)[1]
    lines = second[128 + 640 + 320 : 128 + 640 + 640].reshape(5, 64)[:, :4]  # k = 32 to 63
    code = rows.codes[16, 32:64].view(np.uint8).reshape(8, 4)
    assert lines[:4].tolist() == [((code[2 * i] & 15) | code[2 * i + 1] << 4).tolist() for i in range(4)]
    assert lines[4].tolist() == np.bitwise_or.reduce([code[i] >> 4 << i for i in range(8)]).tolist()
    assert len(second) == 128 + 640 + 320 * 16


def test_the_codes_of_a_w2ks_panel() -> None:
    rows = random_units("w2ks", (17, 300), 16)
    second = pack_quantised(rows)[1]
    line = second[128 + 2 * 576 + 64 : 128 + 2 * 576 + 128][:4]  # k = 16 to 31
    code = rows.codes[16, 16:32].view(np.uint8).reshape(4, 4)
    assert line.tolist() == np.bitwise_or.reduce([code[i] << 2 * i for i in range(4)]).tolist()
    assert len(second) == 128 + 2 * (576 + 64 * 16)


def test_the_codes_of_a_w3k_panel() -> None:
    rows = random_units("w3k", (17, 300), 16)
    second = pack_quantised(rows)[1]
    numbers = 2 * 288
    lines = second[128 + numbers + 192 : 128 + numbers + 384].reshape(3, 64)[:, :4]  # k = 32 to 63
    code = (rows.codes[16, 32:64] + 4).view(np.uint8).reshape(8, 4)
    for half in range(2):
        low = [(code[4 * half + i] & 3) << 2 * i for i in range(4)]
        assert lines[half].tolist() == np.bitwise_or.reduce(low).tolist()
    assert lines[2].tolist() == np.bitwise_or.reduce([code[i] >> 2 << i for i in range(8)]).tolist()
    assert len(second) == 128 + numbers + 192 * 16


def test_the_codes_of_w2t_and_w3t_panels() -> None:
    """Behind a header and three groups of 16 scales: four with what fills them up."""
    code = random_grouped((17, 150), 64, bits=2).codes[16, 16:32].reshape(4, 4)
    second = pack_quantised(random_grouped((17, 150), 64, bits=2))[1]
    line = second[128 + 128 + 64 :][:4]  # k = 16 to 31
    assert line.tolist() == np.bitwise_or.reduce([code[i] << 2 * i for i in range(4)]).tolist()
    assert len(second) == 128 + 128 + 64 * 16
    code = random_grouped((17, 150), 64, bits=3).codes[16, 32:64].reshape(8, 4)
    second = pack_quantised(random_grouped((17, 150), 64, bits=3))[1]
    lines = second[128 + 128 + 192 :][:192].reshape(3, 64)[:, :4]  # k = 32 to 63
    for half in range(2):
        low = [(code[4 * half + i] & 3) << 2 * i for i in range(4)]
        assert lines[half].tolist() == np.bitwise_or.reduce(low).tolist()
    assert lines[2].tolist() == np.bitwise_or.reduce([code[i] >> 2 << i for i in range(8)]).tolist()
    assert len(second) == 128 + 128 + 192 * 8
