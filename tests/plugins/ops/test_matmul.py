"""matmul: against torch in float64, every epilogue, and the rounding of its input."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array

PLAIN: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "f32"}


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
