"""Scales that are whole numbers of units: as float32 numbers, in another order of columns, beside other scales."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.convert.quantised.alike import made_alike
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, without_units
from ingot.convert.quantised.order import with_columns_swapped, with_rows
from ingot.convert.quantised.values import float_values
from ingot.dtypes import DType

ROWS, COLUMNS = 24, 512


def piece(dtype: DType, values: np.ndarray, rows: int) -> Piece:
    """Read so many rows at a time."""

    def read() -> Iterator[Bits]:
        return (values[begin : begin + rows].reshape(-1) for begin in range(0, len(values), rows))

    return Piece(dtype=dtype, shape=values.shape, read=read)


def weight(*, offsets: bool = False, group: int = 16) -> Quantised:
    rng = np.random.default_rng(group)

    def counts() -> np.ndarray:
        return rng.integers(-128, 128, (ROWS, COLUMNS // group)).astype(np.int8)

    def units() -> np.ndarray:
        return rng.standard_normal((ROWS, 2)).astype(np.float16)

    pieces = {
        "codes": piece(DType.I8, rng.integers(-32, 32, (ROWS, COLUMNS)).astype(np.int8), 5),
        "scale": piece(DType.I8, counts(), 7),
        "scale_unit": piece(DType.F16, units(), 4),
    }
    if offsets:
        pieces |= {"offset": piece(DType.I8, counts(), 3), "offset_unit": piece(DType.F16, units(), 24)}
    return Quantised(
        name="w", format="gguf", file=Path("w"), shape=(ROWS, COLUMNS), code=Code.I8, group=group, pieces=pieces
    )


def numbers(made: Quantised, kind: str) -> np.ndarray:
    return np.concatenate([each.reshape(-1) for each in made.pieces[kind].read()]).reshape(made.pieces[kind].shape)


def wanted(of: Quantised) -> np.ndarray:
    """By the definition, in float64: exact before the sum with an offset."""

    def spread(kind: str) -> np.ndarray:
        units = np.repeat(numbers(of, f"{kind}_unit").astype(np.float64), COLUMNS // 2, axis=1)
        return np.repeat(numbers(of, kind).astype(np.float64), of.group, axis=1) * units

    values = (numbers(of, "codes") * spread("scale")).astype(np.float32)
    found: np.ndarray = values + spread("offset").astype(np.float32) if "offset" in of.pieces else values
    return found


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("group", [16, 32])
def test_float_numbers_have_the_same_values(offsets: bool, group: int) -> None:
    """Whatever rows are read at a time."""
    of = weight(offsets=offsets, group=group)
    plain = without_units(of)
    assert set(plain.pieces) == {"codes", "scale", *(("offset",) if offsets else ())}
    assert plain.pieces["scale"].dtype is DType.F32
    for each in (of, plain):
        np.testing.assert_array_equal(float_values(each), wanted(of))
    assert without_units(plain).pieces == plain.pieces
    assert of.kind == plain.kind


@pytest.mark.parametrize(("outer", "inner", "units"), [(1, 2, True), (2, 1, True), (2, 2, False), (4, 8, False)])
def test_columns_in_another_order(outer: int, inner: int, units: bool) -> None:
    """Units of 256 columns stay where these move as a whole; else every group gets its own scale."""
    of = weight(offsets=True)
    made = with_columns_swapped(of, outer, inner)
    assert ("scale_unit" in made.pieces) == units
    expected = wanted(of).reshape(ROWS, outer, inner, -1).swapaxes(1, 2).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(float_values(made), expected)


def test_rows_in_another_order() -> None:
    of, rows = weight(offsets=True), np.random.default_rng(0).permutation(ROWS)[:10]
    made = with_rows(of, rows)
    assert made.pieces["scale_unit"].shape == (10, 2)
    np.testing.assert_array_equal(float_values(made), wanted(of)[rows])


def test_weights_beside_others_lose_their_units() -> None:
    first, second = weight(group=32), weight(offsets=True, group=16)
    found = made_alike([first, second])
    assert found is not None
    for made, of in zip(found, (first, second), strict=True):
        assert set(made.pieces) == {"codes", "scale", "offset"}
        assert made.group == 16
        np.testing.assert_array_equal(float_values(made), wanted(of))
