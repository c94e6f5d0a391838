"""activation: each function against torch, plain and gated."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ingot.plugins.activations import ACTIVATIONS
from tests.plugins.ops.calls import evaluate, random_array

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def test_every_activation_is_compared() -> None:
    assert set(TORCH) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", TORCH)
def test_against_torch(name: str) -> None:
    x, up = random_array(4, 9) * 6, random_array(4, 9, seed=1)
    x[0, 0], x[0, 1] = 90, -90  # nothing overflows
    expected = TORCH[name](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(evaluate("activation", [x, None], {"activation": name})[0], expected, atol=1e-6)
    gated = evaluate("activation", [x, up], {"activation": name})[0]
    np.testing.assert_allclose(gated, expected * up, rtol=1e-5, atol=1e-6)
