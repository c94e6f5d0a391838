"""cast: against torch, bit for bit."""

import numpy as np
import pytest
import torch

from tests.plugins.ops.calls import evaluate, make_batch, random_array


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_against_torch(to: str, dtype: torch.dtype) -> None:
    x = random_array(3, 5)
    x[0, :3] = np.nan, np.inf, 1 + 2.0**-9  # the last one lies in the middle of two bf16
    (y,) = evaluate("cast", [x], {"to": to}, make_batch([0] * 3, [3], [0], [[0]]))
    np.testing.assert_array_equal(y, torch.from_numpy(x).to(dtype).float().numpy())
