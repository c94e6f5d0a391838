"""add_to_streams: streams follow the active one, or all but it take a branch."""

import numpy as np

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array


def test_streams_follow_what_one_has_changed_by() -> None:
    x, made, coefs = random_array(4, 3, 6), random_array(4, 6, seed=1), random_array(4, 3, seed=2)
    (y,) = evaluate("add_to_streams", [x.reshape(4, 18), made, coefs], {"streams": 3, "active": 1})
    for i in range(3):
        expected = x[:, i] + (1 + coefs[:, i, None]) * (made - x[:, 1])
        np.testing.assert_allclose(y[:, 6 * i : 6 * i + 6], expected, atol=1e-6)
    (same,) = evaluate("add_to_streams", [x.reshape(4, 18), made, 0 * coefs], {"streams": 3, "active": 1})
    np.testing.assert_allclose(same[:, 6:12], made, atol=1e-6)


def test_a_branch_for_all_but_one() -> None:
    x, made = random_array(4, 18), random_array(4, 6, seed=1)
    made[0, 0] = np.inf  # no product with zero
    (y,) = evaluate("add_to_streams", [x, made, None], {"streams": 3, "active": 0})
    np.testing.assert_array_equal(y[:, :6], x[:, :6])
    np.testing.assert_array_equal(y[:, 6:], x[:, 6:] + np.concatenate([made, made], axis=1))


def test_sizes() -> None:
    problem = find_op("add_to_streams").size_problem
    assert problem is not None
    assert problem([(8,), (4,), None], {"streams": 2, "active": 1}) is None
    assert problem([(9,), (4,), None], {"streams": 2, "active": 0}) == "9 columns are no 2 streams of one width"
    assert problem([(8,), (4,), None], {"streams": 2, "active": 2}) == "stream 2 is none of 2"
    assert "made" in (problem([(8,), (3,), None], {"streams": 2, "active": 0}) or "")
    assert "coefs" in (problem([(8,), (4,), (3,)], {"streams": 2, "active": 0}) or "")
