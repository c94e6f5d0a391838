"""sort_by_expert: every slot of every row once, expert by expert."""

import numpy as np

from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate


def test_slots_are_sorted_by_expert_and_keep_their_order() -> None:
    ids = np.array([[1, 3], [0, 3], [1, 2]], np.float32)
    (lists,) = evaluate("sort_by_expert", [ids], {"experts": 4})
    assert lists.shape == (3, 10)
    assert lists.reshape(-1)[:6].tolist() == [2, 0, 4, 5, 1, 3]
    assert not lists.reshape(-1)[6:].any()


def test_a_row_takes_each_expert_once_at_most() -> None:
    problem = find_op("sort_by_expert").size_problem
    assert problem([(4,)], {"experts": 4}) is None
    assert problem([(5,)], {"experts": 4}) == "a row cannot take 5 of 4 experts"
