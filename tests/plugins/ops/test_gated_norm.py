"""gated_norm: against torch, the gate before and after the norm."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("norm_first", [0, 1])
@pytest.mark.parametrize(("activation", "width"), [("silu", 6), ("sigmoid", 12)])
def test_against_torch(norm_first: int, activation: str, width: int) -> None:
    x, gate, weight = random_array(3, 12), random_array(3, 12, seed=1), random_array(width, seed=2)
    attrs: dict[str, Attr] = {"eps": 1e-5, "columns": 6, "norm_first": norm_first, "activation": activation}
    (y,) = evaluate("gated_norm", [x, gate, weight], attrs)
    open_by = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation](torch.from_numpy(gate))
    total = torch.from_numpy(x) * (1 if norm_first else open_by)
    normal = torch.nn.functional.rms_norm(total.reshape(3, 2, 6), (6,), None, 1e-5).reshape(3, 12)
    expected = normal * torch.from_numpy(np.tile(weight, 12 // width)) * (open_by if norm_first else 1)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5)
