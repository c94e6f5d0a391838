"""add_gated: against torch."""

import numpy as np
import torch

from tests.plugins.ops.calls import evaluate, random_array


def test_against_torch() -> None:
    a, b, gate = random_array(5, 7), random_array(5, 7, seed=1), 9 * random_array(5, 1, seed=2)
    (y,) = evaluate("add_gated", [a, b, gate], {})
    expected = torch.from_numpy(a) + torch.from_numpy(gate).sigmoid() * torch.from_numpy(b)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-6)
