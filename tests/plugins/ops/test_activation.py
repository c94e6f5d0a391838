"""activation: each function against torch, plain and gated."""

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from ingot.plugins.activations import ACTIVATIONS
from tests.plugins.ops.calls import evaluate, random_array

OTHER_NAMES = {"none": "linear", "gelu_tanh": "gelu_pytorch_tanh"}  # that transformers has


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_torch(name: str) -> None:
    x, up = random_array(4, 9) * 6, random_array(4, 9, seed=1)
    x[0, 0], x[0, 1] = 90, -90  # nothing overflows
    expected = ACT2FN[OTHER_NAMES.get(name, name)](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(evaluate("activation", [x, None], {"activation": name})[0], expected, atol=1e-6)
    gated = evaluate("activation", [x, up], {"activation": name})[0]
    np.testing.assert_allclose(gated, expected * up, rtol=1e-5, atol=1e-6)
