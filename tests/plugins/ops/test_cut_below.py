"""cut_below: against torch, and the share of normal numbers that stays."""

import statistics

import numpy as np
import torch

from tests.plugins.ops.calls import evaluate, random_array


def test_against_torch() -> None:
    x = 3 * random_array(5, 33) + 1
    (y,) = evaluate("cut_below", [x], {"deviations": 0.5})
    rows = torch.from_numpy(x)
    bound = rows.mean(dim=-1, keepdim=True) + 0.5 * rows.std(dim=-1, keepdim=True, unbiased=False)
    np.testing.assert_allclose(y, torch.relu(rows - bound).numpy(), atol=1e-6)


def test_five_of_a_hundred_stay() -> None:
    (y,) = evaluate("cut_below", [random_array(1, 20000)], {"deviations": statistics.NormalDist().inv_cdf(0.95)})
    assert abs((y > 0).mean() - 0.05) < 0.005
