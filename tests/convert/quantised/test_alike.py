"""Weights of several forms become one form, and keep their values."""

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.convert.quantised.alike import made_alike
from ingot.convert.quantised.bits import nibbles, pack_nibbles, signed_bytes
from ingot.convert.quantised.form import Code, Piece, Quantised, same_form
from ingot.dtypes import DType, from_float32, to_float32

ROWS, COLUMNS = 6, 64
FEW = (*(float(each) for each in range(-4, 4)), *[0.0] * 8)
TABLE = tuple(float(each) for each in range(-120, 40, 10))
IQ2 = (1, 3.125, 5.375, *[0.0] * 5, -1, -3.125, -5.375, *[0.0] * 5)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a weight is stored; zero, offset: whether groups have them; factor: whether rows have one."""

    code: Code
    group: int
    zero: bool = False
    offset: bool = False
    factor: bool = False
    table: tuple[float, ...] = ()


def weight(form: Form) -> tuple[Quantised, npt.NDArray[np.float32]]:
    """(random codes, their values)"""
    code, group, table = form.code, form.group, form.table
    rng = np.random.default_rng(group + len(code.value))
    low, high = {Code.U4: (0, 16), Code.I4: (-8, 8), Code.U8: (0, 256), Code.I8: (-128, 128)}[code]
    codes, groups = rng.integers(low, high, (ROWS, COLUMNS)), (ROWS, -(-COLUMNS // group))
    stored = codes.astype(np.int8 if low else np.uint8)
    packed = pack_nibbles(stored.view(np.uint8)) if code.packed else stored
    scale = from_float32(rng.uniform(0.01, 0.02, groups).astype(np.float32), DType.F16)
    pieces = {"codes": _piece(DType.U8 if code.packed else code.byte, packed), "scale": _piece(DType.F16, scale)}
    values = (np.array(table)[codes] if table else codes).astype(np.float32)
    if form.zero:
        zeros = rng.integers(0, high, groups).astype(np.uint8)
        pieces["zero"] = _piece(DType.U8, zeros)
        values -= zeros.repeat(group, 1)[:, :COLUMNS]
    values *= to_float32(scale, DType.F16).repeat(group, 1)[:, :COLUMNS]
    if form.offset:
        offsets = rng.uniform(-1, 1, groups).astype(np.float32)
        pieces["offset"] = _piece(DType.F32, offsets)
        values += offsets.repeat(group, 1)[:, :COLUMNS]
    if form.factor:
        factors = rng.uniform(0.5, 2, (ROWS, 1)).astype(np.float32)
        pieces["factor"] = _piece(DType.F32, factors)
        values *= factors
    made = Quantised(
        name="w", format="x", file=Path("x"), shape=(ROWS, COLUMNS), code=code, group=group, pieces=pieces, table=table
    )
    return made, values


def _piece(dtype: DType, stored: npt.NDArray[np.generic]) -> Piece:
    return Piece(dtype=dtype, shape=stored.shape, read=lambda: iter([row.reshape(-1) for row in stored]))


def _read(made: Quantised, kind: str) -> npt.NDArray[np.float32]:
    piece = made.pieces[kind]
    found = np.concatenate(list(piece.read())).view(piece.dtype.storage).reshape(piece.shape)
    return to_float32(found, piece.dtype).repeat(COLUMNS // piece.shape[1], 1)


def _signed_nibbles(made: Quantised) -> npt.NDArray[np.float32]:
    packed = np.concatenate(list(made.pieces["codes"].read())).view(np.uint8)
    return signed_bytes(nibbles(packed)).view(np.int8).reshape(ROWS, COLUMNS).astype(np.float32)


@pytest.mark.parametrize(
    "forms",
    [
        (Form(code=Code.I4, group=32), Form(code=Code.I8, group=16)),
        (Form(code=Code.U4, group=32, offset=True), Form(code=Code.I8, group=32)),
        (Form(code=Code.U4, group=32, table=TABLE), Form(code=Code.I4, group=64)),
        (Form(code=Code.U4, group=32, table=FEW), Form(code=Code.I4, group=64)),
        (Form(code=Code.U4, group=64, zero=True), Form(code=Code.U8, group=32, zero=True)),
        (Form(code=Code.I4, group=48), Form(code=Code.I8, group=32)),  # the last group is smaller
        (Form(code=Code.U4, group=32, zero=True), Form(code=Code.U8, group=48, zero=True)),
        (Form(code=Code.U4, group=32, table=IQ2), Form(code=Code.U4, group=16, offset=True)),
        (Form(code=Code.U4, group=16, table=E2M1, factor=True), Form(code=Code.U4, group=32, table=IQ2)),
    ],
)
def test_values_stay(forms: tuple[Form, ...]) -> None:
    given = [weight(form) for form in forms]
    made = made_alike([each for each, _ in given])
    assert made is not None
    assert same_form(made[0], made[1])
    assert (made[0].code is Code.I4) == (forms[0].table == FEW)
    for found, (_, values) in zip(made, given, strict=True):
        numbers = _read(found, "codes") if found.code is not Code.I4 else _signed_nibbles(found)
        numbers -= _read(found, "zero") if "zero" in found.pieces else 0
        numbers *= _read(found, "scale")
        numbers += _read(found, "offset") if "offset" in found.pieces else 0
        numbers *= _read(found, "factor") if "factor" in found.pieces else 1
        np.testing.assert_array_equal(numbers, values)


def test_a_factor_that_only_one_has() -> None:
    """Codes stay as they are."""
    given = [weight(Form(code=Code.U4, group=16, table=E2M1, factor=factor))[0] for factor in (True, False)]
    made = made_alike(given)
    assert made is not None
    assert same_form(made[0], made[1])
    assert made[1].code is Code.U4
    assert (_read(made[1], "factor") == 1).all()


@pytest.mark.parametrize(
    "forms",
    [
        (Form(code=Code.U4, group=32, table=(0.5, *TABLE[1:])), Form(code=Code.I8, group=32)),  # no whole number
        (Form(code=Code.U8, group=32, zero=True), Form(code=Code.I8, group=32)),
        (Form(code=Code.U4, group=32, zero=True), Form(code=Code.U8, group=32, offset=True)),
    ],
)
def test_forms_that_have_none_in_common(forms: tuple[Form, ...]) -> None:
    assert made_alike([weight(form)[0] for form in forms]) is None
