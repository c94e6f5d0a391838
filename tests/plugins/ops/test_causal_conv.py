"""causal_conv: against torch, whole and in chunks; a slot of its own is a snapshot."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import random_array
from tests.plugins.ops.states import in_chunks


@pytest.mark.parametrize("chunks", [(40,), (1, 1, 30, 8), (16, 24), (33, 7)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_against_torch(chunks: tuple[int, ...], activation: str) -> None:
    x, weight, bias = random_array(40, 5), random_array(4, 5, seed=1), random_array(5, seed=2)
    attrs: dict[str, Attr] = {"layer": 0, "channels": 5, "width": 4, "activation": activation}
    got, cache = in_chunks("causal_conv", [x, weight.reshape(-1), bias], 1, attrs, chunks, [3, 1, 2])
    padded = torch.nn.functional.pad(torch.from_numpy(x.T.copy())[None], (3, 0))
    kernel = torch.from_numpy(weight.T.copy())[:, None]
    expected = torch.nn.functional.conv1d(padded, kernel, torch.from_numpy(bias), groups=5)[0].T
    if activation == "silu":
        expected = torch.nn.functional.silu(expected)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(cache.of(0, 3), x[13:16].reshape(-1))  # after block 0
    np.testing.assert_array_equal(cache.of(0, 2), x[37:].reshape(-1))
