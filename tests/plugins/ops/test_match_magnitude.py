"""match_magnitude: what it makes has the wanted root mean square, and the direction it had."""

import numpy as np
import pytest

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("joins", [0, 1])
def test_magnitude_and_direction(joins: int) -> None:
    x, like = random_array(4, 2, 6), 3 * random_array(4, 6, seed=1)
    attrs = {"streams": 2, "joins": joins, "least": 1e-5}
    (y,) = evaluate("match_magnitude", [x.reshape(4, 12), like], dict(attrs))
    if joins:
        np.testing.assert_array_equal(y[:, :6], like)
    made = y[:, 6 * joins :].reshape(4, 2, 6)
    wanted = np.sqrt((like.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(np.sqrt((made.astype(np.float64) ** 2).mean(axis=2)), wanted * [1, 1], rtol=1e-6)
    np.testing.assert_allclose(
        made / np.linalg.norm(made, axis=2, keepdims=True), x / np.linalg.norm(x, axis=2)[..., None], atol=1e-6
    )


def test_small_streams_are_bounded() -> None:
    x, like = np.full((1, 4), 1e-9, np.float32), np.ones((1, 4), np.float32)
    (y,) = evaluate("match_magnitude", [x, like], {"streams": 1, "joins": 0, "least": 1e-4})
    np.testing.assert_allclose(y, 1e-7, rtol=1e-6)


def test_sizes() -> None:
    problem = find_op("match_magnitude").size_problem
    assert problem is not None
    assert problem([(8,), (4,)], {"streams": 2}) is None
    assert "no 2 streams" in (problem([(8,), (5,)], {"streams": 2}) or "")
    assert "no 2 streams" in (problem([(9,), (4,)], {"streams": 2}) or "")
