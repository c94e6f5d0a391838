"""softcap: against torch."""

import numpy as np
import torch

from tests.plugins.ops.calls import evaluate, make_batch, random_array


def test_against_torch() -> None:
    x = random_array(3, 5) * 40
    (y,) = evaluate("softcap", [x], {"cap": 30.0}, make_batch([0] * 3, [3], [0], [[0]]))
    np.testing.assert_allclose(y, 30 * torch.tanh(torch.from_numpy(x) / 30), rtol=1e-6)
