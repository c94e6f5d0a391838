"""ingot's own matrix products, as on a machine without cuBLASLt: values at odd shapes, and the same bits for a row
whatever stands beside it."""

import ctypes

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.cuda import session
from ingot.plugins.op import Array
from tests.plugins.cpu.one_step import Input, Packed, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import run_step

ROWS = (1, 7, 9, 17, 65)  # each kernel computes some
SHAPES = ((33, 8, 0), (70, 300, 0), (66, 172, 1), (300, 520, 0), (2, 1000, 1))  # n, k, gated


@pytest.fixture(autouse=True)
def _without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_library", lambda: "it is not here")


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(
    driver: ctypes.CDLL, dtype: DType, rows: int, shape: tuple[int, int, int], which: int
) -> tuple[Array, Array]:
    """What the kernels and the reference make of the first rows of one input. which: activation and epilogue."""
    n, k, gated = shape
    out, extra = n // 2 if gated else n, which % 4
    weight = Packed(values=normal(k, n, k) / np.float32(k**0.5), dtype=dtype)
    attrs: dict[str, Attr] = {
        "activation": (*ACTIVATIONS,)[which % len(ACTIVATIONS)],
        "gated": gated,
        "activations": dtype.value,
        "group": 0,
    }
    bias: Input = Packed(values=normal(2, n)) if extra in (1, 3) else None
    residual = normal(3, 200, out)[:rows] if extra in (2, 3) else None
    inputs: list[Input] = [normal(1, 200, k)[:rows], weight, bias, residual]
    kernel, batch = f"matmul.{dtype.value}.sm80", plain_batch(rows)
    (expected,) = reference_outputs(kernel, inputs, attrs, batch)
    (found,) = run_step(driver, kernel, inputs, attrs, batch)
    return found, expected


def check(driver: ctypes.CDLL, dtype: DType, every: int = 1) -> None:
    """Every kernel with every shape; every: only each so many of the cases."""
    cases = [(rows, shape) for rows in ROWS for shape in SHAPES]
    for which, (rows, shape) in [*enumerate(cases)][::every]:
        found, expected = product(driver, dtype, rows, shape, which)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=6e-6 * scale, err_msg=f"{rows} {shape}")


def check_bits(driver: ctypes.CDLL, dtype: DType, shape: tuple[int, int, int], which: int) -> None:
    """A row alone, in few and in many."""
    alone, _ = product(driver, dtype, 1, shape, which)
    for rows in (5, 16, 40, 130):
        found, _ = product(driver, dtype, rows, shape, which)
        assert found[:1].tobytes() == alone.tobytes(), f"{rows} rows"


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
def test_values(gpu: ctypes.CDLL, dtype: DType) -> None:
    check(gpu, dtype, 3)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
@pytest.mark.parametrize(("shape", "which"), [((70, 300, 0), 3), ((66, 172, 1), 7), ((40, 1104, 0), 2)])
def test_a_row_has_the_same_bits_in_any_batch(
    gpu: ctypes.CDLL, dtype: DType, shape: tuple[int, int, int], which: int
) -> None:
    check_bits(gpu, dtype, shape, which)
