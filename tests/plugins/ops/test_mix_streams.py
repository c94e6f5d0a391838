"""mix_streams: against a sum in float64, one pair of streams at a time."""

import numpy as np
import pytest

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("count", [1, 2, 4])
def test_against_a_sum_in_float64(count: int) -> None:
    x, coefs = random_array(3, count * 5), random_array(3, count * count, seed=1)
    (y,) = evaluate("mix_streams", [x, coefs], {"streams": count})
    expected = x.astype(np.float64)
    for i in range(count):
        for j in range(count):
            part = coefs[:, i * count + j, None].astype(np.float64) * x[:, j * 5 : j * 5 + 5]
            expected[:, i * 5 : i * 5 + 5] += part
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_sizes() -> None:
    problem = find_op("mix_streams").size_problem
    assert problem is not None
    assert problem([(8,), (4,)], {"streams": 2}) is None
    assert problem([(9,), (4,)], {"streams": 2}) == "9 columns are no 2 streams of one width"
    assert "coefs" in (problem([(8,), (3,)], {"streams": 2}) or "")
