"""layer_norm: against torch, with and without bias and residual."""

import numpy as np
import pytest
import torch

from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_against_torch(with_bias: bool, with_residual: bool) -> None:
    x, weight = random_array(3, 17) * 4 + 2, random_array(17, seed=1)
    bias = random_array(17, seed=2) if with_bias else None
    residual = random_array(3, 17, seed=3) if with_residual else None
    y, total = evaluate("layer_norm", [x, weight, bias, residual], {"eps": 1e-5})
    summed = x if residual is None else x + residual
    np.testing.assert_array_equal(total, summed)
    expected = torch.nn.functional.layer_norm(
        torch.from_numpy(summed),
        (17,),
        torch.from_numpy(weight),
        None if bias is None else torch.from_numpy(bias),
        1e-5,
    )
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5)
