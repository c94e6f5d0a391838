"""The table of weight formats: what it says is what the search gives, what panels hold, and what kernels there are."""

import re

import numpy as np
import pytest

from ingot.builder.quantise import quantise
from ingot.dtypes import DType, Precision
from ingot.plugins.layouts import pack_quantised, panel_bytes, unpack_quantised
from ingot.plugins.registry import find_target
from ingot.weight_formats import FORMATS, HEADER_BYTES, PANEL, QUANTISED, TABLE_FORMAT, UNIT_COLUMNS, WeightFormat
from tests.house.project import ROOT


def test_the_dtypes_of_the_table_are_those_that_are_quantised() -> None:
    assert {dtype.value for dtype in DType if dtype.is_quantised} == set(FORMATS)
    assert QUANTISED == ("w8", "w4g128", "w4g64", "w4g32")
    assert TABLE_FORMAT.dtype == "w8"


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def test_kernels_have_the_same_table() -> None:
    text = (ROOT / "plugins/cpu/matmul/weight_formats.h").read_text()
    rows = dict(re.findall(r"constexpr WeightFormat (\w+)\{(.*?)\};", text, flags=re.DOTALL))
    assert list(rows) == re.split(r",\s+", _found(r"kWeightFormats\[\] =\s+\{([^}]*)\};", text))
    for row, described in zip(rows.values(), FORMATS.values(), strict=True):
        assert _found(r'\.dtype = "(\w+)"', row) == described.dtype
        assert int(_found(r"\.bits = (\d+)", row)) == described.bits
        assert _found(r"\.k_block = (\w+)", row).replace("kUnitK", str(UNIT_COLUMNS)) == str(described.k_block)
        assert int(_found(r"\.group_bytes = (\d+)", row)) == described.group_bytes
        assert int(_found(r"\.unit_bytes = (\d+)", row)) == described.unit_bytes
        assert _found(r"\.rows_alone = (\w+)", row) == str(described.rows_alone).lower()
        groups = _found(r"\.groups = \{(.*?)\}", row).split(", ")
        assert tuple(int(group) for group in groups if group != "0") == described.groups
        assert _found(r"\.in_tables = (\w+)", row) == str(described.in_tables).lower()
    assert int(_found(r"kPanel = (\d+);", text)) == PANEL
    assert int(_found(r"kHeaderBytes = (\d+);", text)) == HEADER_BYTES
    assert int(_found(r"kUnitK = (\d+);", text)) == UNIT_COLUMNS
    assert f'"{TABLE_FORMAT.dtype}"' in rows[_found(r"kTableFormat = (\w+);", text)]


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_as_the_table_says(name: str) -> None:
    precision = Precision.parse(name)
    assert str(precision) == name
    described = precision.dtype.weight_format
    assert described is not None
    values = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)
    rows = quantise(values, precision)
    assert rows.format is described
    assert (rows.codes.min(), rows.codes.max()) == described.codes, "the outermost ones are in use"
    assert (rows.group in described.groups) == (rows.multipliers is not None)
    if rows.multipliers is not None:
        assert np.abs(rows.multipliers).max() == described.multiplier
        assert rows.multipliers.all()
    panels = pack_quantised(rows)
    columns = -(-300 // described.k_block) * described.k_block
    least = 16 * (columns * described.bits // 8 + rows.scale.itemsize)
    assert least < panels.shape[1] == panel_bytes(300, precision.dtype, precision.group) < 1.2 * least
    np.testing.assert_array_equal(unpack_quantised(panels, 40, 300, precision.group).integers, rows.integers)


@pytest.mark.parametrize("name", ["w4", "w8g32", "w4t", "w4g16", "w4g", "w4g032", "int8", "", "bf16g32"])
def test_other_names_are_no_precision(name: str) -> None:
    with pytest.raises(ValueError, match="is not a precision"):
        Precision.parse(name)


@pytest.mark.native
@pytest.mark.parametrize("described", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("target", ["ref", "cpu/avx2", "cpu/amx"])
def test_every_format_has_kernels_with_and_without_int8_activations(target: str, described: WeightFormat) -> None:
    names = find_target(target).kernels()
    for op in ("matmul", "moe_gate_up", "moe_down"):
        assert any(name.startswith(f"{op}.{described.dtype}.") for name in names)
        rounds = any(name.startswith(f"{op}.{described.dtype}a8.") for name in names)
        assert rounds == described.rounds_inputs
    assert any(name.startswith(f"embedding.{described.dtype}.") for name in names) == described.in_tables
