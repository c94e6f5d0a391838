"""scale: against torch, bit for bit."""

import numpy as np
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, make_batch, random_array

ATTRS: tuple[dict[str, Attr], ...] = ({"factor": 0.22}, {"factor": -3.0})  # which kernels are tried with


def test_against_torch() -> None:
    x = random_array(3, 5)
    (y,) = evaluate("scale", [x], {"factor": 0.22}, make_batch([0] * 3, [3], [0], [[0]]))
    np.testing.assert_array_equal(y, torch.from_numpy(x) * torch.tensor(0.22))
