"""ingot's own matrix products, as on a machine without cuBLASLt: values at odd shapes, and the same bits for a row
whatever stands beside it."""

import ctypes

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.cuda import own_products
from ingot.plugins.cuda.bind import ACTIVATIONS
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows
from tests.plugins.cpu.one_step import Input, Packed, Quantised, plain_batch, reference_outputs
from tests.plugins.cuda.one_step import layout_of, run_step
from tests.spanning import spanning, values

ROWS = (1, 7, 9, 17, 65)  # each kernel computes some
SHAPES = ((33, 8, 0), (70, 300, 0), (66, 172, 1), (300, 520, 0), (2, 1000, 1))  # n, k, gated


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codes(precision: str, n: int, k: int) -> QuantisedRows:
    """Of w8, or of w4 with the group of its name: every code and multiplier that there is."""
    random, _, group = np.random.default_rng(n + k), *precision.partition("g")[::2]
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
    driver: ctypes.CDLL, precision: str, rows: int, shape: tuple[int, int, int], which: int
) -> tuple[Array, Array]:
    """What the kernels and the reference make of the first rows of one input. which: activation and epilogue."""
    n, k, gated = shape
    out, extra, dtype = n // 2 if gated else n, which % 4, precision.partition("g")[0]
    weight: Packed = (
        Quantised.of(codes(precision, n, k), gated=bool(gated))
        if dtype in ("w8", "w4")
        else Packed(values=normal(k, n, k) / np.float32(k**0.5), dtype=DType(dtype))
    )
    attrs: dict[str, Attr] = {
        "activation": (*ACTIVATIONS,)[which % len(ACTIVATIONS)],
        "gated": gated,
        "activations": "bf16" if dtype in ("w8", "w4") else dtype,
        "group": weight.group,
    }
    bias: Input = Packed(values=normal(2, n)) if extra in (1, 3) else None
    residual = normal(3, 200, out)[:rows] if extra in (2, 3) else None
    inputs: list[Input] = [normal(1, 200, k)[:rows], weight, bias, residual]
    kernel, batch, kv = f"matmul.{dtype}.sm80", plain_batch(rows), DType(str(attrs["activations"]))
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
    "precision", ["bf16", pytest.param("f16", marks=pytest.mark.slow), "f32", "w8", "w4g32", "w4g128"]
)
def test_values(gpu: ctypes.CDLL, precision: str) -> None:
    check(gpu, precision, 3)


BITS = [
    (shape, which, precision)
    for shape, which in (((70, 300, 0), 3), ((66, 172, 1), 7), ((40, 1104, 0), 2))
    for precision in ("bf16", "f32", "w8", "w4g64")
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("shape", "which", "precision"), spanning(BITS, *values(3)))
def test_a_row_has_the_same_bits_in_any_batch(
    gpu: ctypes.CDLL, precision: str, shape: tuple[int, int, int], which: int
) -> None:
    check_bits(gpu, precision, shape, which)


@pytest.mark.daily(1)
@pytest.mark.parametrize("hidden", [1, 16, 63, 300])
def test_tables_of_codes(gpu: ctypes.CDLL, hidden: int) -> None:
    """Token and position rows of w8."""
    table, positions = (Quantised.of(codes("w8", 65 + i, hidden), panels=False) for i in (0, 1))
    for inputs in ([table, None], [table, positions]):
        batch, attrs = plain_batch(9), {"scale": 1.5}
        (expected,) = reference_outputs("embedding.w8.sm80", [*inputs], attrs, batch)
        (found,) = run_step(gpu, "embedding.w8.sm80", [*inputs], attrs, batch, kv=layout_of(DType.BF16))
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=1e-7)


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
