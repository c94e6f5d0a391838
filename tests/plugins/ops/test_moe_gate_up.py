"""moe_gate_up: each slot against the op matmul with the weight of its expert."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from tests.plugins.ops.calls import evaluate, random_array

UNCLAMPED: dict[str, Attr] = {"limit": 0.0, "alpha": 1.0}


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize(("activation", "gated"), [("silu", 1), ("gelu_tanh", 1), ("relu2", 0)])
def test_each_slot_is_a_product(activation: str, gated: int, activations: str) -> None:
    x, weight = random_array(4, 11), random_array(5, 6, 11, seed=1)
    ids = np.array([[0, 4], [1, 2], [0, 4], [2, 3]], np.float32)
    attrs: dict[str, Attr] = {"activation": activation, "activations": activations, "group": 0, "gated": gated}
    bias = random_array(5, 6, seed=2)
    (y,) = evaluate("moe_gate_up", [x, ids, weight, bias.reshape(-1)], {**attrs, **UNCLAMPED})
    assert y.shape == (4, 6 if gated else 12)
    for row, slot in np.ndindex(4, 2):
        expert = int(ids[row, slot])
        inputs = [x[row : row + 1], weight[expert], bias[expert], None]
        (expected,) = evaluate("matmul", inputs, attrs)
        np.testing.assert_array_equal(y.reshape(4, 2, -1)[row, slot], expected[0])


def test_a_clamped_gate_is_that_of_transformers() -> None:
    """As GptOssExperts has it, with its biases; some numbers lie beyond the limit on each side."""
    x, weight, bias = 3 * random_array(9, 11), random_array(2, 6, 11, seed=1), random_array(2, 6, seed=2)
    ids = np.arange(9, dtype=np.float32)[:, None] % 2
    attrs: dict[str, Attr] = {"activation": "silu", "activations": "f32", "group": 0, "gated": 1}
    attrs |= {"limit": 1.5, "alpha": 1.702}
    (y,) = evaluate("moe_gate_up", [x, ids, weight, bias.reshape(-1)], attrs)
    for row, expert in enumerate(ids[:, 0].astype(int)):
        gate, up = torch.from_numpy(weight[expert] @ x[row] + bias[expert]).chunk(2)
        gate, up = gate.clamp(max=1.5), up.clamp(min=-1.5, max=1.5)
        np.testing.assert_allclose(y[row], ((up + 1) * gate * torch.sigmoid(1.702 * gate)).numpy(), atol=1e-5)
