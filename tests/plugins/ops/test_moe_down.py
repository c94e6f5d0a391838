"""moe_down: the weighted sum of what the op matmul makes of each slot."""

import numpy as np
import pytest

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("activations", ["f32", "bf16"])
def test_a_weighted_sum_of_products(activations: str) -> None:
    x, weights, weight = random_array(4, 2 * 5), random_array(4, 2, seed=1), random_array(6, 7, 5, seed=2)
    ids = np.array([[0, 4], [1, 2], [0, 5], [2, 3]], np.float32)
    bias = random_array(6, 7, seed=3)
    given = [x, ids, weights, weight, bias.reshape(-1)]
    (y,) = evaluate("moe_down", given, {"activations": activations, "group": 0})
    assert y.shape == (4, 7)
    for row in range(4):
        total = np.zeros(7, np.float32)
        for slot in range(2):
            expert = int(ids[row, slot])
            inputs = [x[row : row + 1, 5 * slot : 5 * slot + 5], weight[expert], bias[expert], None]
            attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": activations, "group": 0}
            total += weights[row, slot] * evaluate("matmul", inputs, attrs)[0][0]
        np.testing.assert_array_equal(y[row], total)


def test_no_rows() -> None:
    ids = random_array(0, 2)
    (y,) = evaluate(
        "moe_down", [random_array(0, 10), ids, ids, random_array(3, 7, 5)], {"activations": "f32", "group": 0}
    )
    assert y.shape == (0, 7)
