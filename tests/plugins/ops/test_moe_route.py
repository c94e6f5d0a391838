"""moe_route: against torch's softmax and topk; ties, and what is not finite."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from ingot.plugins.op import Array
from tests.plugins.ops.calls import evaluate, random_array


def route(
    logits: Array, per_token: int, normalized: int = 1, bias: Array | None = None, **more: Attr
) -> tuple[Array, ...]:
    usual: dict[str, Attr] = {"score": "softmax", "eps": 0.0, "floor": 0.0, "scale": 1.0}
    usual |= {"groups": 1, "group_top": 1, "group_best": 2}
    return evaluate("moe_route", [logits, bias], {**usual, "per_token": per_token, "normalized": normalized, **more})


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


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [0, 1])
def test_a_bias_only_selects(score: str, normalized: int) -> None:
    """As torch has it; and it changes what is taken."""
    logits, bias = 2 * random_array(9, 60), random_array(60, seed=1)
    given = torch.from_numpy(logits)
    shares = given.sigmoid() if score == "sigmoid" else given.softmax(dim=-1)
    chosen = (shares + torch.from_numpy(bias)).topk(4, dim=-1).indices.sort(dim=-1).values
    top = shares.gather(-1, chosen)
    if normalized:
        top = top / (top.sum(dim=-1, keepdim=True).clamp(min=0.25) + 0.125)
    more: dict[str, Attr] = {"score": score, "eps": 0.125, "floor": 0.25, "scale": 2.5}
    ids, weights = route(logits, 4, normalized, bias, **more)
    np.testing.assert_array_equal(ids, chosen.numpy())
    np.testing.assert_allclose(weights, 2.5 * top.numpy(), rtol=2e-6)
    assert (ids != route(logits, 4, normalized, None, **more)[0]).any()


@pytest.mark.parametrize(("score", "best"), [("softmax", 2), ("sigmoid", 2), ("softmax", 1)])
def test_only_experts_of_the_best_groups_are_taken(score: str, best: int) -> None:
    """Groups are ranked by their two best keys, as DeepSeek V3 has it, or by their best one, as V2."""
    logits, bias = 3 * random_array(40, 24), random_array(24, seed=1)
    given = torch.from_numpy(logits)
    keys = (given.sigmoid() if score == "sigmoid" else given.softmax(dim=-1)) + torch.from_numpy(bias)
    taken = keys.view(-1, 6, 4).topk(best, dim=-1).values.sum(dim=-1).topk(2, dim=-1).indices
    allowed = torch.zeros(40, 6).scatter(1, taken, 1.0).repeat_interleave(4, dim=1).bool()
    chosen = keys.masked_fill(~allowed, -torch.inf).topk(5, dim=-1).indices.sort(dim=-1).values
    ids, _ = route(logits, 5, 1, bias, score=score, groups=6, group_top=2, group_best=best)
    np.testing.assert_array_equal(ids, chosen.numpy())
    assert (ids != route(logits, 5, 1, bias, score=score)[0]).any()


def test_a_sigmoid_that_is_not_a_number_is_taken_and_spoils_its_sum_alone() -> None:
    logits = random_array(3, 8)
    logits[1, 4] = np.nan
    for groups in (1, 2):
        for normalized in (0, 1):
            ids, weights = route(logits, 2, normalized, score="sigmoid", groups=groups)
            assert 4 in ids[1]
            assert np.isnan(weights[1]).sum() == (2 if normalized else 1)
            assert np.isfinite(weights[[0, 2]]).all()


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
