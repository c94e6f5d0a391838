"""sigmoid_gate: against torch."""

import numpy as np
import torch

from tests.plugins.ops.calls import evaluate, random_array


def test_against_torch() -> None:
    x, gate = random_array(3, 7), 9 * random_array(3, 7, seed=1)
    (y,) = evaluate("sigmoid_gate", [x, gate], {})
    np.testing.assert_allclose(y, (torch.from_numpy(x) * torch.from_numpy(gate).sigmoid()).numpy(), atol=1e-6)
