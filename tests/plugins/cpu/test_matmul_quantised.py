"""Products of w8 and w4 weights: exact where rows are rounded to int8, and the same bits in every company."""

import dataclasses
import itertools
import re
from collections.abc import Iterator

import numpy as np
import pytest

from ingot import _cpu
from ingot.errors import EngineError
from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array
from ingot.plugins.quantised import MAX_K, QuantisedRows
from ingot.plugins.target import SessionOptions
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.weight_formats import FORMATS, W2KS, W4KS, WeightFormat
from tests.plugins.cpu.one_step import (
    Input,
    Packed,
    Quantised,
    activations_of,
    native_outputs,
    one_step_plan,
    open_step,
    plain_batch,
    reference_outputs,
    runnable_isa,
)
from tests.plugins.ops.calls import random_grouped, random_rows, random_units, rows_of
from tests.spanning import isa, precision, spanning

pytestmark = pytest.mark.native

KERNELS = [name for name in kernel_table() if name.startswith(("matmul.w", "matmul.f8"))]
EXACT = [name for name in KERNELS if name.split(".")[1].endswith("a8")]
GROUPED = re.compile(r"matmul\.w\d[tk]")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 63, 65)
KS = (1, 17, 63, 64, 129, 172, 300)
NS = (1, 15, 17, 40)
BLOCKS = ((150, 70, 2200), (3, 1500, 70), (2, 40, 2200), (530, 20, 40), (300, 1792, 40), (2, 2072, 2048))  # rows, N, K
TILES = ((20, 300, 700), (9, 150, 1300), (288, 34, 5700), (520, 50, 3000))
TOLERANCE = 4e-6  # of float sums, relative to the largest number of the result
ROUNDING = 4e-7  # of activation functions


def _format(kernel: str) -> WeightFormat:
    return FORMATS[kernel.split(".")[1].removesuffix("a8")]


UNITS = [(name, group) for name in EXACT if _format(name).unit_bytes for group in _format(name).groups]
WIDE_UNITS = [(name, group) for name, group in UNITS if name.endswith(".avx512") and _format(name).bits > 3]


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rows(kernel: str, n: int, k: int, index: int) -> WeightRows:
    """Groups may be longer than K."""
    return rows_of(_format(kernel).dtype, n, k, index)


def _attrs(kernel: str, group: int, activation: str = "none", gated: bool = False) -> dict[str, Attr]:
    return {"activation": activation, "gated": int(gated), "activations": activations_of(kernel), "group": group}


def _tolerance(kernel: str, activation: str) -> float:
    if kernel not in EXACT:
        return TOLERANCE
    return 0.0 if activation in ("none", "relu") else ROUNDING


def _assert_close(got: Array, expected: Array, tolerance: float, what: str) -> None:
    scale = float(np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale, err_msg=what)


def _run(session: CpuSession, rows: int) -> Array:
    (y,) = native_outputs(session, plain_batch(rows))
    return y


def _cases(kernel: str) -> Iterator[tuple[list[Input], dict[str, Attr]]]:
    """Every K with half of the Ns; group, activation, gate, bias and residual go round. 65 rows of x."""
    pairs = [(k, NS[i]) for number, k in enumerate(KS) for i in range(number % 2, len(NS), 2)]
    for index, (k, out) in enumerate(pairs):
        gated = index % 3 == 0
        n = 2 * out if gated else out
        weight = Quantised.of(_rows(kernel, n, k, index // 2), gated=gated)
        bias = Packed(values=_normal(index, n)) if index % 2 else None
        residual = _normal(index + 1, max(ROWS), out) if index % 4 < 2 else None
        activation = ("none", *ACTIVATIONS)[index % (len(ACTIVATIONS) + 1)]
        yield (
            [_normal(index + 2, max(ROWS), k), weight, bias, residual],
            _attrs(kernel, weight.group, activation, gated),
        )


@pytest.mark.daily(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_the_specification_says_in_every_company(kernel: str) -> None:
    """65 rows match the reference, bit for bit with int8 rows; any first rows and a row alone get the same bits."""
    for index, (inputs, attrs) in enumerate(_cases(kernel)):
        batch = plain_batch(max(ROWS))
        session = open_step(kernel, inputs, attrs, batch, threads=1 + index % 3, pieces=1 + index % 2)
        whole = _run(session, max(ROWS))
        (expected,) = reference_outputs(kernel, inputs, attrs, batch)
        _assert_close(whole, expected, _tolerance(kernel, str(attrs["activation"])), f"case {index}")
        for rows in ROWS:
            assert _run(session, rows).tobytes() == whole[:rows].tobytes(), f"case {index}, {rows} rows"
        for name, value in (("in0", inputs[0]), ("in3", inputs[3])):
            if isinstance(value, np.ndarray):
                session.native.write_buffer(name, value[40:41])
        assert _run(session, 1).tobytes() == whole[40:41].tobytes(), f"case {index}, row 40 alone"
        session.close()


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kernel", "shape"),
    spanning(itertools.product(KERNELS, BLOCKS), precision, lambda kernel, shape: (isa(kernel), shape)),
)
def test_products_of_many_blocks(kernel: str, shape: tuple[int, int, int]) -> None:
    """More rows, panels and k than one block holds, more y than L2, panels that are left for the first to finish; the
    same bits on any threads and for fewer rows."""
    rows, n, k = shape
    weight = Quantised.of(_rows(kernel, n, k, n))
    inputs: list[Input] = [_normal(1, rows, k), weight, None, None]
    attrs, batch = _attrs(kernel, weight.group), plain_batch(rows)
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    session = open_step(kernel, inputs, attrs, batch)
    first = _run(session, rows)
    _assert_close(first, expected, _tolerance(kernel, "none"), kernel)
    assert _run(session, rows // 2).tobytes() == first[: rows // 2].tobytes()
    for threads in (2, 5):
        again = _run(open_step(kernel, inputs, attrs, batch, threads=threads, pieces=2), rows)
        assert again.tobytes() == first.tobytes()


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kernel", "shape"),
    spanning(
        itertools.product([name for name in KERNELS if "amx" in name], TILES),
        precision,
        lambda kernel, shape: (isa(kernel), shape),
    ),
)
def test_products_on_tiles(kernel: str, shape: tuple[int, int, int]) -> None:
    """Few rows past panels without a stop; many that stay in L2 over the whole K, or half of them, or none."""
    rows, n, k = shape
    weight = Quantised.of(_rows(kernel, n, k, n), gated=n == 50)
    inputs: list[Input] = [_normal(1, rows, k), weight, None, None]
    attrs, batch = _attrs(kernel, weight.group, "silu" if n == 50 else "none", n == 50), plain_batch(rows)
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    for threads in (1, 2):
        got = _run(open_step(kernel, inputs, attrs, batch, threads=threads), rows)
        _assert_close(got, expected, _tolerance(kernel, str(attrs["activation"])), kernel)


@pytest.mark.daily(21)
@pytest.mark.parametrize("kernel", [name for name in EXACT if not GROUPED.match(name)])
@pytest.mark.parametrize(("group", "k"), [(32, MAX_K), (64, 640), (128, 641)])
def test_the_largest_integers(kernel: str, group: int, k: int) -> None:
    """Codes of -8 under multipliers of 15 and -15, or of 127, and rows of nothing but 127: no sum overflows."""
    runnable_isa(kernel)
    rows = random_rows(17, k, group if ".w4" in kernel else 0)
    rows.codes[:] = -8 if rows.group else 127
    rows.codes[1] = 7 if rows.group else -127
    rows.codes[2, 1::2] = 7 if rows.group else -127
    if rows.multipliers is not None:
        rows.multipliers[:] = 15
        rows.multipliers[::2] = -15
    x = np.full((7, k), 3.0, np.float32)
    x[1] = -3
    x[2, ::2] = -3
    x[3, ::4] = -3
    x[4, : k // 2] = -3
    inputs: list[Input] = [x, Quantised.of(rows), None, None]
    attrs = _attrs(kernel, rows.group)
    (expected,) = reference_outputs(kernel, inputs, attrs, plain_batch(7))
    session = open_step(kernel, inputs, attrs, plain_batch(7))
    for count in (1, 2, 7):
        assert _run(session, count).tobytes() == expected[:count].tobytes()


@pytest.mark.parametrize(
    ("kernel", "rows"),
    spanning(itertools.product(KERNELS, (1, 4, 6, 40)), precision, lambda kernel, rows: (isa(kernel), rows)),
)
def test_rows_that_int8_cannot_hold(kernel: str, rows: int) -> None:
    """NaN and infinity stay in their row; rows of zeros and of the smallest numbers are zero."""
    weight = Quantised.of(_rows(kernel, 17, 171, rows))
    attrs, x = _attrs(kernel, weight.group), _normal(1, rows, 171)
    clean = _run(open_step(kernel, [x, weight, None, None], attrs, plain_batch(rows)), rows)
    for position, value in ((0, np.nan), (31, np.inf), (100, -np.nan), (127, -np.inf), (170, np.nan)):
        bad = rows // 2
        dirty = x.copy()
        dirty[bad, position] = value
        got = _run(open_step(kernel, [dirty, weight, None, None], attrs, plain_batch(rows), threads=2), rows)
        assert not np.isfinite(got[bad]).any()
        assert np.delete(got, bad, axis=0).tobytes() == np.delete(clean, bad, axis=0).tobytes()
    for nothing in (0.0, 1e-38, 1e-45):
        x[0] = nothing
        got = _run(open_step(kernel, [x, weight, None, None], attrs, plain_batch(rows)), rows)
        assert np.abs(got[0]).max() <= 171 * 127 * 16 * nothing
        assert got[1:].tobytes() == clean[1:].tobytes()


@pytest.mark.parametrize("kernel", EXACT)
def test_the_largest_number_is_found_wherever_it_is(kernel: str) -> None:
    """Of either sign, in any of the vectors that a row is read in, and at its end."""
    places = range(3, 171, 8)
    x = _normal(1, len(places) + 1, 171)
    for row, place in enumerate((*places, 170)):
        x[row, place] = 5 * (-1) ** row
    x[::3] *= 1e30
    x[1::3] *= 1e-30
    weight = Quantised.of(_rows(kernel, 17, 171, 0))
    inputs: list[Input] = [x, weight, None, None]
    attrs, batch = _attrs(kernel, weight.group), plain_batch(len(x))
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    assert _run(open_step(kernel, inputs, attrs, batch), len(x)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kernel", EXACT)
def test_ties_are_rounded_to_even(kernel: str) -> None:
    """A row whose largest number is 127 keeps its halves: 0.5, 1.5, 2.5 become 0, 2, 2."""
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    rows = _rows(kernel, 8, 8, 0)
    rows.scale[:] = 1
    rows.codes[:] = np.eye(8)
    if isinstance(rows, GroupedRows):
        if rows.table is not None:
            rows.table[:] = np.arange(16)
        rows.group_scale[:] = 1
        if rows.shift is not None:
            rows.shift[:] = 0
    elif isinstance(rows, UnitRows):
        rows.count[:], rows.unit[:] = 1, 1
        if rows.offset_count is not None:
            rows.offset_count[:] = 0
    elif isinstance(rows, QuantisedRows) and rows.multipliers is not None:
        rows.multipliers[:] = 1
    weight = Quantised.of(rows)
    y = _run(open_step(kernel, [x, weight, None, None], _attrs(kernel, rows.group), plain_batch(1)), 1)
    assert y.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def _refusal(kernel: str, k: int, packed_group: int, **changes: Attr) -> str:
    rows = QuantisedRows(scale=np.ones(1, np.float32), codes=np.zeros((1, k), np.int8))
    if packed_group:
        rows = dataclasses.replace(rows, multipliers=np.ones((1, -(-k // packed_group)), np.int8), group=packed_group)
    x = np.zeros((1, k), np.float32)
    plan, section = one_step_plan(
        kernel, [x, Quantised.of(rows), None, None], _attrs(kernel, packed_group), plain_batch(1)
    )
    step = dataclasses.replace(plan.steps[0], attrs={**plan.steps[0].attrs, **changes})
    plan = dataclasses.replace(plan, steps=(step,))
    with pytest.raises(EngineError) as refused:
        open_native(plan, section, SessionOptions(num_blocks=(1,), threads=1), runnable_isa(kernel))
    return str(refused.value)


def test_plans_that_do_not_fit_the_kernel_are_refused() -> None:
    assert "w4 weight does not come in groups of 16" in _refusal("matmul.w4a8.avx2", 70, 32, group=16)
    assert "must be [N, K] of layout panel16.w4g64" in _refusal("matmul.w4a8.avx2", 70, 32, group=64)
    assert "w8 weight does not come in groups of 32" in _refusal("matmul.w8a8.avx2", 70, 0, group=32)
    assert "does not take w8 weights with f32 activations" in _refusal("matmul.w8a8.avx2", 70, 0, activations="f32")
    assert "does not take w8 weights with int8 activations" in _refusal("matmul.w8.avx2", 70, 0, activations="int8")
    assert "does not take bf16 activations" in _refusal("matmul.w8.avx2", 70, 0, activations="bf16")
    assert "too long for int8 activations" in _refusal("matmul.w8a8.avx2", MAX_K + 1, 0)


@pytest.mark.parametrize("kernel", [name for name in EXACT if ".w4t" in name])
@pytest.mark.parametrize("group", [16, 64, 128])
def test_panels_with_and_without_more_bits(kernel: str, group: int) -> None:
    """Whatever is multiplied beside a panel, the bits are those of the reference."""
    rows = random_grouped((70, 2200), group, "offset" if ".w4ts" in kernel else "", more_bits=True)
    assert rows.more_bits is not None
    rows.more_bits[16:32], rows.more_bits[64:] = 0, 0
    _assert_same_bits(kernel, rows, _normal(1, 40, 2200), (1, 2, 5, 9, 17, 40))


@pytest.mark.parametrize("kernel", [name for name in EXACT if ".w4t" in name])
@pytest.mark.parametrize("group", [16, 128])
def test_the_largest_values_of_a_table(kernel: str, group: int) -> None:
    """-127 and 127 throughout, times rows of nothing but 127: no sum of a group overflows, whatever it is made of."""
    runnable_isa(kernel)
    rows = random_grouped((17, 700), group, "zero" if ".w4ts" in kernel else "", more_bits=True)
    assert rows.more_bits is not None
    assert rows.table is not None
    rows.table[:], rows.more_bits[:] = np.repeat([-127, 127], 8), np.repeat([-128, 127], 8)
    rows.codes[:2] = [[0], [15]]
    _assert_same_bits(kernel, rows, _largest_inputs(), (1, 2, 9))


@pytest.mark.parametrize("kernel", [name for name in EXACT if ".w4ts" in name])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_zero_points_that_bytes_can_and_cannot_take_up(kernel: str, group: int) -> None:
    """Many rows may subtract zero points from values first. Pairs of panels: both can, one can, none can; a value is
    one too small for a byte, or one too large, at the last group alone; shifts are halves, offsets, too large."""
    n, k = 12 * 16 + 3, 2200
    rows = random_grouped((n, k), group, "zero")
    assert rows.table is not None
    assert rows.shift is not None
    rows.table[:] = np.linspace(-100, 100, 16)
    rows.table[16:32] = np.linspace(-120, 112, 16)
    panels = rows.shift[: 12 * 16].reshape(12, 16, -1)
    panels[0, 3, -1], panels[1, 5, 0] = 28, 8  # values from -128 to 127
    panels[2, 15, -1], rows.codes[2 * 16 + 15, -1] = 29, 0
    panels[5, 0, -1], rows.codes[5 * 16, -1] = -28, 15
    panels[6, 7, 0] = 2.5
    panels[9, 2, -1] = 65504
    panels[10, 1, 0] = -0.0
    rows.is_offset[11 * 16 : 12 * 16] = True
    x = _normal(2, 40, k)
    x[3] = 3.0  # 127 throughout: the largest sums
    _assert_same_bits(kernel, rows, x, (1, 12, 13, 25, 40))


@pytest.mark.parametrize("kernel", [name for name in EXACT if ".w8t" in name])
@pytest.mark.parametrize("group", [16, 128])
def test_the_largest_bytes(kernel: str, group: int) -> None:
    """-128 and 127 throughout, times rows of nothing but 127: no sum of a group overflows."""
    runnable_isa(kernel)
    rows = random_grouped((17, 700), group, "zero" if ".w8ts" in kernel else "", byte_codes=True)
    rows.codes[:] = np.where(rows.codes < 0, -128, 127)
    rows.codes[:2] = [[-128], [127]]
    _assert_same_bits(kernel, rows, _largest_inputs(), (1, 2, 9))


@pytest.mark.parametrize(("kernel", "group"), UNITS)
def test_the_largest_codes_and_numbers_of_units(kernel: str, group: int) -> None:
    """The outermost codes and counts, and the largest and smallest units, times rows of nothing but 127."""
    runnable_isa(kernel)
    rows = random_units(_format(kernel).dtype, (17, 700), group)
    low, high = rows.format.codes
    rows.codes[:] = np.where(rows.codes * 2 < low + high, low, high)
    rows.codes[:2] = [[low], [high]]
    rows.count[::2], rows.count[1::2] = 0 if rows.format in (W2KS, W4KS) else -128, 127
    rows.unit[3], rows.unit[4], rows.unit[5] = 65504, 2.0**-24, -rows.unit[5]
    if rows.offset_count is not None:
        rows.offset_count[::3], rows.offset_count[1::3] = 127, -128
    _assert_same_bits(kernel, rows, _largest_inputs(), (1, 2, 9))


@pytest.fixture(params=[False, True])
def whether_32_bits_are_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    preferred = _cpu.set_quick_multiply_32(request.param)
    yield
    _cpu.set_quick_multiply_32(preferred)


@pytest.mark.usefixtures("whether_32_bits_are_quick")
@pytest.mark.parametrize(("kernel", "group"), WIDE_UNITS)
def test_sums_of_groups_that_just_fit_16_bits(kernel: str, group: int) -> None:
    """And those that just do not, of either sign, among rows whose sums fit."""
    runnable_isa(kernel)
    rows = random_units(_format(kernel).dtype, (33, 700), group)
    low, high = rows.format.codes
    rows.codes[:2] = [[low], [high]]
    columns, limit = (16 if low else 32), 32767 // max(high, -low)
    x = np.zeros((9, 700), np.float32)
    for row, total in enumerate((limit, -limit, 130, limit, -limit, limit, limit + 1, -limit - 1, limit)):
        x[row, :columns] = np.sign(total) * np.diff(np.minimum(np.arange(columns + 1) * 127, abs(total)))
    _assert_same_bits(kernel, rows, x, (2, 3, 6, 9))


@pytest.mark.usefixtures("whether_32_bits_are_quick")
@pytest.mark.parametrize(("kernel", "group"), WIDE_UNITS)
def test_sums_of_units_multiplied_in_16_and_in_32_bits(kernel: str, group: int) -> None:
    """Both have the bits of the reference, whichever this CPU prefers: few rows, and many that share unpacked codes."""
    runnable_isa(kernel)
    rows = random_units(_format(kernel).dtype, (70, 1300), group)
    _assert_same_bits(kernel, rows, _normal(3, 40, 1300), (1, 2, 6, 7, 12, 13, 25, 40))


def _largest_inputs() -> Array:
    """Rows that int8 activations store as nothing but 127 and -127, [9, 700]."""
    x = np.full((9, 700), 3.0, np.float32)
    x[1], x[2, ::2], x[3, ::4] = -3, -3, -3
    return x


def _assert_same_bits(kernel: str, rows: GroupedRows | UnitRows, x: Array, counts: tuple[int, ...]) -> None:
    """The first rows of x, as many as each count, have the bits of the reference."""
    inputs: list[Input] = [x, Quantised.of(rows), None, None]
    attrs, batch = _attrs(kernel, rows.group), plain_batch(len(x))
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    session = open_step(kernel, inputs, attrs, batch)
    for count in counts:
        assert _run(session, count).tobytes() == expected[:count].tobytes()
