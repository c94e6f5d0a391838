"""all_reduce: the sum that ranks make together."""

import numpy as np
import pytest

from ingot.plugins.op import Array
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array


def together(values: list[Array]) -> Array:
    collective = find_op("all_reduce").collective
    assert collective is not None
    return collective(values)


def test_the_tree_of_all_reduce() -> None:
    """Neighbours first: another order rounds otherwise."""
    a, b, c, d = (np.float32(each).reshape(1, 1) for each in (1e8, 1, -1e8, 1))
    assert together([a, b, c, d])[0, 0] == (a + b + (c + d))[0, 0] == 0
    assert together([a, c, b, d])[0, 0] == 2


@pytest.mark.parametrize("ranks", [2, 8])
def test_sums_of_sums_are_the_sums_of_fewer_ranks(ranks: int) -> None:
    values = [random_array(3, 5) for _ in range(2 * ranks)]
    pairs = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    np.testing.assert_array_equal(together(values), together(pairs))


@pytest.mark.parametrize(("op", "attrs"), [("all_reduce", {}), ("all_gather", {"columns": 8})])
def test_no_rank_computes_it_by_itself(op: str, attrs: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="together"):
        evaluate(op, [random_array(2, 4)], {"ranks": 2, **attrs}, make_batch([1, 1], [2], [0], [[0]], []))
