"""add: a + b."""

import numpy as np

from tests.plugins.ops.calls import evaluate, random_array


def test_sum() -> None:
    a, b = random_array(3, 5), random_array(3, 5, seed=1)
    np.testing.assert_array_equal(evaluate("add", [a, b], {})[0], a + b)
