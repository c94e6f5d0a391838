"""rms_norm: against torch, with and without residual."""

import numpy as np
import pytest
import torch

from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("with_residual", [False, True])
def test_against_torch(with_residual: bool) -> None:
    x, weight = random_array(3, 17) * 4, random_array(17, seed=1)
    residual = random_array(3, 17, seed=3) if with_residual else None
    y, total = evaluate("rms_norm", [x, weight, residual], {"eps": 1e-6})
    summed = x if residual is None else x + residual
    np.testing.assert_array_equal(total, summed)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(summed), (17,), torch.from_numpy(weight), 1e-6)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5)
