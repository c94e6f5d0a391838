"""FP8 weights times rows of bf16: the sums that docs/design.md describes, bit for bit, on every level that has them."""

import itertools

import numpy as np
import pytest

from ingot.dtypes import DType, round_to_bf16, to_float32
from ingot.plan import Attr
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.op import Array
from tests.plugins.cpu.one_step import Quantised, activations_of, native_outputs, open_step, plain_batch
from tests.plugins.ops.calls import random_f8

pytestmark = pytest.mark.native

PAIRS = ("matmul.f8.avx512bf16", "matmul.f8.avx512bf16emu")
ROUNDING = (*PAIRS, "matmul.f8.amx", "matmul.f8.amxemu")
ROWS = 40


def _run(kernel: str, x: Array, weight: F8Rows, rows: int, threads: int = 1) -> Array:
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


def _written_out(x: Array, weight: F8Rows) -> Array:
    """One output after another. A product of two numbers of bf16 and float64 sums of these are exact."""
    k, n = x.shape[1], len(weight.codes)
    inputs, numbers = round_to_bf16(x), to_float32(weight.codes, DType.F8)
    group = weight.group or 128
    scales = np.ones((n, -(-k // group)), np.float32)
    if weight.group_scale is not None:
        scales = weight.group_scale
    y = np.zeros((len(x), n), np.float32)
    for r, c in np.ndindex(len(x), n):
        total = np.float32(0)
        for begin, parity in itertools.product(range(0, k, group), range(2)):
            end = min(begin + group, k)
            sum_ = np.float32(0)
            for at in range(begin + 2 * parity, end, 4):
                for i in range(min(at + 1, end - 1), at - 1, -1):  # the odd column, then the even one
                    sum_ = np.float32(np.float64(inputs[r, i]) * numbers[c, i] + sum_)
            total = np.float32(np.float64(sum_) * scales[c, begin // group] + total)
        y[r, c] = total * weight.scale[c]
    return y


@pytest.mark.parametrize("kernel", PAIRS)
@pytest.mark.parametrize(("k", "group"), [(1, 0), (7, 16), (150, 0), (301, 32), (430, 128)])
def test_the_sums_are_those_of_the_design(kernel: str, k: int, group: int) -> None:
    """Even and odd pairs of up to 128 columns, or of a group, each fed by two fused additions for each pair."""
    x, weight = _x(k)[:3], random_f8((4, k), group)
    assert _run(kernel, x, weight, 3).tobytes() == _written_out(x, weight).tobytes()


@pytest.mark.parametrize("group", [0, 16, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(40, 33), (100, 1102), (24, 2048)])
def test_levels_agree_bit_for_bit_for_any_number_of_rows(n: int, k: int, group: int) -> None:
    """Rows that read the codes once, that pass over them several times, and that leave them widened, by blocks."""
    x, weight = _x(k), random_f8((n, k), group)
    native, emulated = PAIRS
    whole = _run(emulated, x, weight, ROWS)
    for rows, threads in itertools.product((1, 2, 4, 5, 9, 12, 13, 25, 36, 37, ROWS), (1, 2)):
        assert _run(native, x, weight, rows, threads).tobytes() == whole[:rows].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("kernel", ROUNDING)
def test_x_is_rounded_to_bf16(kernel: str) -> None:
    x, weight = _x(64), random_f8((16, 64), 32)
    assert _run(kernel, x, weight, ROWS).tobytes() == _run(kernel, round_to_bf16(x), weight, ROWS).tobytes()
