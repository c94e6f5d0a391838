"""head_matmul: a matrix for each head, beside columns that stay."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, random_array


@pytest.mark.parametrize("kept", [0, 3])
def test_each_head_has_its_own_matrix(kept: int) -> None:
    x, weight = random_array(5, 4 * (6 + kept), seed=1), random_array(4, 7, 6, seed=2)
    attrs: dict[str, Attr] = {"heads": 4, "kept": kept, "activations": "f32", "group": 0}
    (y,) = evaluate("head_matmul", [x, weight], attrs)
    for head in range(4):
        columns = x[:, head * (6 + kept) : (head + 1) * (6 + kept)]
        made = y[:, head * (7 + kept) : (head + 1) * (7 + kept)]
        np.testing.assert_allclose(made[:, :7], columns[:, :6] @ weight[head].T, atol=1e-5)
        assert np.array_equal(made[:, 7:], columns[:, 6:])


def test_sizes() -> None:
    problem, attrs = find_op("head_matmul").size_problem, {"heads": 4, "kept": 3}
    assert problem(((36,), (4, 7, 6), None), attrs) is None
    assert problem(((36,), (4, 7, 6), (36,)), attrs) is None
    assert "cannot be multiplied" in str(problem(((35,), (4, 7, 6), None), attrs))
    assert "the weight has 2" in str(problem(((18,), (2, 7, 6), None), attrs))
    assert "tail has shape (35,)" in str(problem(((36,), (4, 7, 6), (35,)), attrs))
    assert "none are kept" in str(problem(((24,), (4, 7, 6), (24,)), {"heads": 4, "kept": 0}))


def test_kept_columns_come_from_what_was_not_rounded() -> None:
    x, tail, weight = random_array(5, 18, seed=1), random_array(5, 18, seed=3), random_array(2, 7, 6, seed=2)
    attrs: dict[str, Attr] = {"heads": 2, "kept": 3, "activations": "f32", "group": 0}
    (y,), (other,) = (evaluate("head_matmul", [x, weight, each], attrs) for each in (tail, None))
    made, plain = y.reshape(5, 2, 10), other.reshape(5, 2, 10)
    assert np.array_equal(made[..., :7], plain[..., :7])
    assert np.array_equal(made[..., 7:], tail.reshape(5, 2, 9)[..., 6:])
