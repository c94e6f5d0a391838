"""matmul: against torch in float64, every epilogue, and the rounding of its input."""

import numpy as np
import pytest
import torch

from ingot.dtypes import DType, to_float32
from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array, random_f8, random_rows

PLAIN: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "f32", "group": 0}


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_product_with_bias_activation_and_residual(rows: int) -> None:
    x, weight, bias = random_array(rows, 11), random_array(6, 11, seed=1), random_array(6, seed=2)
    residual = random_array(rows, 6, seed=3)
    linear = torch.nn.functional.linear(*(torch.from_numpy(a).double() for a in (x, weight, bias)))
    expected = torch.nn.functional.silu(linear).numpy() + residual
    (y,) = evaluate("matmul", [x, weight, bias, residual], {**PLAIN, "activation": "silu"})
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_gated() -> None:
    x, weight = random_array(3, 11), random_array(8, 11, seed=1)
    gate, up = (torch.from_numpy(half).double() for half in np.split(weight, 2))
    wide = torch.from_numpy(x).double()
    expected = torch.nn.functional.gelu(wide @ gate.T) * (wide @ up.T)
    (y,) = evaluate("matmul", [x, weight, None, None], {**PLAIN, "activation": "gelu", "gated": 1})
    assert y.shape == (3, 4)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5)


def test_bf16_activations_are_rounded_first() -> None:
    x, weight = random_array(3, 11), random_array(6, 11, seed=1)
    rounded = torch.from_numpy(x).bfloat16().double() @ torch.from_numpy(weight).double().T
    (y,) = evaluate("matmul", [x, weight, None, None], {**PLAIN, "activations": "bf16"})
    np.testing.assert_allclose(y, rounded.numpy(), atol=1e-6)
    assert np.abs(y - evaluate("matmul", [x, weight, None, None], PLAIN)[0]).max() > 1e-4


@pytest.mark.parametrize("group", [0, 32])
def test_quantised_weights_with_int8_activations(group: int) -> None:
    """Written out with Python's own integers and one float32 product at the end."""
    x, rows = random_array(3, 70), random_rows(5, 70, group)
    x[1] = 0
    (y,) = evaluate("matmul", [x, rows, None, None], {**PLAIN, "activations": "int8", "group": group})
    for r, n in np.ndindex(3, 5):
        top = np.float32(np.abs(x[r]).max())
        codes = [int(np.rint(value * (np.float32(127) / top))) if top else 0 for value in x[r]]
        total = sum(int(q) * a for q, a in zip(rows.integers[n], codes, strict=True))
        assert y[r, n] == np.float32(total) * ((top / np.float32(127)) * rows.scale[n])


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_quantised_weights_with_float_activations(group: int, activations: str) -> None:
    x, rows = random_array(3, 70), random_rows(5, 70, group)
    (y,) = evaluate("matmul", [x, rows, None, None], {**PLAIN, "activations": activations, "group": group})
    (expected,) = evaluate("matmul", [x, rows.values, None, None], {**PLAIN, "activations": activations})
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("group", [0, 128])
def test_fp8_weights_with_fp8_activations(group: int) -> None:
    """Written out with torch's FP8, a row of x and a group at a time."""
    x, rows = random_array(3, 300), random_f8((5, 300), group)
    x[1], x[2, :128] = np.float32(1e-3) * x[1], 0
    columns, numbers = group or 300, to_float32(rows.codes, DType.F8)
    groups = np.ones((5, 1), np.float32) if rows.group_scale is None else rows.group_scale
    (y,) = evaluate("matmul", [x, rows, None, None], {**PLAIN, "activations": "fp8", "group": group})
    for r, n in np.ndindex(3, 5):
        total = 0.0
        for j in range(groups.shape[1]):
            part = x[r, j * columns : (j + 1) * columns]
            top = np.abs(part).max()
            scaled = torch.from_numpy(part * (np.float32(448) / top) if top else part)
            a = scaled.to(torch.float8_e4m3fn).double().numpy()
            total += float(a @ numbers[n, j * columns : (j + 1) * columns]) * float(top) / 448 * float(groups[n, j])
        np.testing.assert_allclose(y[r, n], total * rows.scale[n], rtol=2e-6)


@pytest.mark.parametrize("group", [0, 128])
def test_rows_that_fp8_cannot_hold(group: int) -> None:
    x, rows = random_array(4, 6), random_f8((2, 6), group)
    x[0, 3], x[1, 2], x[2] = np.inf, np.nan, np.float32(1e-38)
    (y,) = evaluate("matmul", [x, rows, None, None], {**PLAIN, "activations": "fp8", "group": group})
    assert np.isnan(y[:2]).all()
    assert (y[2] == 0).all()
    assert np.isfinite(y[3]).all()


def test_rows_that_int8_cannot_hold() -> None:
    x, rows = random_array(4, 6), random_rows(2, 6, 0)
    x[0, 3], x[1, 2], x[2] = np.inf, np.nan, np.float32(1e-38)
    (y,) = evaluate("matmul", [x, rows, None, None], {**PLAIN, "activations": "int8"})
    assert np.isnan(y[:2]).all()
    assert (y[2] == 0).all()
    assert np.isfinite(y[3]).all()
