"""linear_attention: the recurrence as torch writes it, whole and in chunks, with and without a snapshot between."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import random_array
from tests.plugins.ops.states import in_chunks

TOKENS, KEY_HEADS, HEADS, KEY, VALUE = 37, 2, 4, 6, 5


@pytest.mark.parametrize(("delta", "dims"), [(True, 1), (False, 1), (True, KEY)])
@pytest.mark.parametrize(("chunks", "table"), [((37,), [0, -1, 2]), ((5, 20, 12), [0, 1, 2]), ((16, 21), [4, -1, 1])])
def test_against_torch(delta: bool, dims: int, chunks: tuple[int, ...], table: list[int]) -> None:
    x = random_array(TOKENS, 2 * KEY_HEADS * KEY + HEADS * VALUE)
    dt, beta = random_array(TOKENS, HEADS * dims, seed=1), random_array(TOKENS, HEADS, seed=2) if delta else None
    a_log, skip = random_array(HEADS, seed=3), None if delta else random_array(HEADS, seed=4)
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "key_dim": KEY,
        "value_dim": VALUE,
        "values_first": 0,
        "scale": 0.5,
        "l2_eps": 1e-6,
        "dt_min": 0.0,
        "dt_max": 3.0e38,
        "by_dim": int(dims > 1),
    }
    got, _ = in_chunks("linear_attention", [x, dt, beta, a_log, skip], 3, attrs, chunks, table)
    parts = torch.from_numpy(x).split([KEY_HEADS * KEY, KEY_HEADS * KEY, HEADS * VALUE], 1)
    q, k = (each.reshape(TOKENS, KEY_HEADS, KEY).repeat_interleave(2, 1) for each in parts[:2])
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    v = parts[2].reshape(TOKENS, HEADS, VALUE)
    steps = torch.nn.functional.softplus(torch.from_numpy(dt))
    decay = (-torch.from_numpy(a_log).exp()[:, None] * steps.reshape(TOKENS, HEADS, dims)).exp()
    state, outputs = torch.zeros(HEADS, KEY, VALUE), []
    for t in range(TOKENS):
        state = state * decay[t][:, :, None]
        if beta is None:
            change = steps[t][:, None] * v[t]
        else:
            change = torch.from_numpy(beta[t]).sigmoid()[:, None] * (v[t] - (k[t][..., None] * state).sum(1))
        state = state + k[t][..., None] * change[:, None]
        outputs.append(
            ((0.5 * q[t])[..., None] * state).sum(1) + (0 if skip is None else torch.from_numpy(skip)[:, None] * v[t])
        )
    expected = torch.stack(outputs).reshape(TOKENS, -1)
    np.testing.assert_allclose(got, expected.numpy(), atol=2e-5)
