"""moe_gate_up: each slot against the op matmul with the weight of its expert."""

import numpy as np
import pytest

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_each_slot_is_a_gated_product(activation: str, activations: str) -> None:
    x, weight = random_array(4, 11), random_array(5, 6, 11, seed=1)
    ids = np.array([[0, 4], [1, 2], [0, 4], [2, 3]], np.float32)
    attrs: dict[str, Attr] = {"activation": activation, "activations": activations, "group": 0}
    (y,) = evaluate("moe_gate_up", [x, ids, weight], attrs)
    assert y.shape == (4, 6)
    for row, slot in np.ndindex(4, 2):
        inputs = [x[row : row + 1], weight[int(ids[row, slot])], None, None]
        (expected,) = evaluate("matmul", inputs, {**attrs, "gated": 1})
        np.testing.assert_array_equal(y.reshape(4, 2, 3)[row, slot], expected[0])
