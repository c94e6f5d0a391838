"""moe_route: against torch's softmax and topk; ties, and what is not finite."""

import numpy as np
import pytest
import torch

from ingot.plugins.op import Array
from tests.plugins.ops.calls import evaluate, random_array


def route(logits: Array, per_token: int, normalized: int = 1) -> tuple[Array, ...]:
    return evaluate("moe_route", [logits], {"per_token": per_token, "normalized": normalized})


@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (5, 2), (60, 4), (128, 8), (7, 7)])
def test_against_torch(experts: int, per_token: int, normalized: int) -> None:
    logits = 3 * random_array(9, experts)
    top, chosen = torch.softmax(torch.from_numpy(logits), dim=-1).topk(per_token, dim=-1)
    if normalized:
        top /= top.sum(dim=-1, keepdim=True)
    chosen, order = chosen.sort(dim=-1)
    ids, weights = route(logits, per_token, normalized)
    np.testing.assert_array_equal(ids, chosen.numpy())
    np.testing.assert_allclose(weights, top.gather(-1, order).numpy(), rtol=1e-6)


def test_of_equal_logits_the_lower_numbers_are_taken() -> None:
    ids, weights = route(np.array([[1, 3, 1, 3, 1, 0], [2, 2, 2, 2, 2, 2]], np.float32), 3)
    assert ids.tolist() == [[0, 1, 3], [0, 1, 2]]
    np.testing.assert_allclose(weights[1], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_spoils_its_row(bad: float) -> None:
    logits = random_array(3, 6)
    logits[1, 4] = bad
    for normalized in (0, 1):
        ids, weights = route(logits, 2, normalized)
        assert 4 in ids[1]
        assert np.isnan(weights[1]).all()
        assert np.isfinite(weights[[0, 2]]).all()


def test_minus_infinity_is_never_taken() -> None:
    ids, weights = route(np.array([[-np.inf, 1, -np.inf, 2]], np.float32), 2)
    assert ids.tolist() == [[1, 3]]
    assert weights.sum() == pytest.approx(1)
